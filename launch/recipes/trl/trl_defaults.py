"""The trainers of TRL, their fields, and the defaults of TRL and transformers.

`tests/foreign/test_trl_defaults.py` compares the tables with TRL, where it is installed.
"""

from __future__ import annotations

from typing import Any

TRAINING: dict[str, Any] = {  # transformers.TrainingArguments, with TRL's changes for all trainers
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "optim_args": None,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "bf16": None,
    "fp16": False,
    "gradient_checkpointing": True,
    "use_liger_kernel": False,
    "neftune_noise_alpha": None,
    "report_to": "none",
    "run_name": None,
    "project": "huggingface",
    "logging_steps": 10,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_on_start": False,
    "per_device_eval_batch_size": 8,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "full_determinism": False,
    "seed": 42,
    "data_seed": None,
    "parallelism_config": None,
    "train_sampling_strategy": "random",
    "dataloader_drop_last": False,
    "push_to_hub": False,
    "resume_from_checkpoint": None,
    "auto_find_batch_size": False,
    # fields of TRL's own that all trainers have
    "model_init_kwargs": None,
    "trust_remote_code": False,
}
MODEL: dict[str, Any] = {  # trl.ModelConfig
    "model_name_or_path": None,
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
}
SCRIPT: dict[str, Any] = {  # trl.ScriptArguments and trl.DatasetMixtureConfig
    "dataset_name": None,
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "datasets": [],
    "test_split_size": None,
}
_SAMPLING: dict[str, Any] = {  # of GRPO and RLOO
    "learning_rate": 1e-06,
    "disable_dropout": False,
    "num_generations_eval": None,
    "max_completion_length": 512,
    "shuffle_dataset": True,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "repetition_penalty": 1.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_structured_outputs_regex": None,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "reward_funcs": None,  # of the script
    "reward_model_name_or_path": None,  # of the script
    "router_aux_loss_coef": None,
}
GRPO: dict[str, Any] = _SAMPLING | {
    "num_generations": 8,
    "cast_lm_head_to_fp32": False,
    "beta": 0.0,
    "delta": None,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "max_tool_calling_iterations": None,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
    "use_bias_correction_kl": True,
}
RLOO: dict[str, Any] = _SAMPLING | {
    "num_generations": 2,
    "beta": 0.05,
    "normalize_advantages": False,
    "reward_clip_range": None,
}
SFT: dict[str, Any] = {
    "learning_rate": 2e-05,
    "chat_template_path": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "eos_token": None,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
    "activation_offloading": False,
    "router_aux_loss_coef": None,
}
DPO: dict[str, Any] = {
    "learning_rate": 1e-06,
    "disable_dropout": True,
    "max_length": 1024,
    "truncation_mode": "keep_start",
    "padding_free": False,
    "loss_type": ["sigmoid"],
    "loss_weights": None,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "label_smoothing": 0.0,
    "beta": 0.1,
    "use_weighting": False,
    "activation_offloading": False,
    "sync_ref_model": False,
    "router_aux_loss_coef": None,
}
KTO: dict[str, Any] = {
    "learning_rate": 1e-06,
    "train_sampling_strategy": "sequential",
    "disable_dropout": True,
    "max_length": 1024,
    "loss_type": "kto",
    "beta": 0.1,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
    "activation_offloading": False,
    "sync_ref_model": False,
    "router_aux_loss_coef": None,
}
REWARD: dict[str, Any] = {
    "learning_rate": 0.0001,
    "chat_template_path": None,
    "disable_dropout": True,
    "eos_token": None,
    "max_length": 1024,
    "center_rewards_coefficient": None,
    "activation_offloading": False,
}

TRAINERS: dict[str, dict[str, Any]] = {"grpo": GRPO, "rloo": RLOO, "sft": SFT, "dpo": DPO, "kto": KTO, "reward": REWARD}
"""TRL's name of a trainer -> its own fields."""
WITHOUT_EFFECT: dict[str, str] = {  # trainer -> fields of its own that mean nothing here
    "grpo": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
    " entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target log_completions_hub_repo",
    "rloo": "",
    "sft": "dataset_num_proc eval_packing pad_token",
    "dpo": "dataset_num_proc precompute_ref_log_probs precompute_ref_batch_size discopop_tau f_alpha_divergence_coef"
    " pad_token ref_model_mixup_alpha ref_model_sync_steps",
    "kto": "dataset_num_proc precompute_ref_log_probs precompute_ref_batch_size ref_model_mixup_alpha ref_model_sync_steps",
    "reward": "dataset_num_proc pad_token",
}
_OF_SAMPLING = (
    " ds3_gather_for_generation cache_implementation vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url"
    " vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port ref_model_mixup_alpha ref_model_sync_steps"
    " log_completions log_multimodal num_completions_to_print log_unique_prompts use_transformers_continuous_batching"
    " transformers_continuous_batching_config use_transformers_paged"
)
for _name in ("grpo", "rloo"):
    WITHOUT_EFFECT[_name] += _OF_SAMPLING
ALGORITHMS = {"grpo": "grpo", "rloo": "grpo", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm"}
"""TRL's name of a trainer -> our algorithm."""
LACKING = {
    "bco": "BCO, which learns from single answers",
    "cpo": "CPO",
    "orpo": "ORPO",
    "tpo": "TPO",
    "xpo": "XPO",
    "nash_md": "Nash-MD",
    "online_dpo": "online DPO",
    "dpo_online": "online DPO",
    "gkd": "GKD by TRL's fields; algorithm=distillation is on-policy distillation",
    "gold": "GOLD by TRL's fields; algorithm=distillation with loss_fn.kl_type=gold has its loss, on-policy",
    "distillation": "distillation by TRL's fields; see algorithm=distillation",
    "sdft": "self-distillation",
    "sdpo": "self-distillation",
    "ssd": "self-distillation",
    "prm": "process reward models",
    "async_grpo": "TRL's asynchronous GRPO; see grpo.async_grpo",
}
"""Name of a trainer, or of the script that starts it -> the feature that it needs."""
SCRIPTS = {"reward_modeling": "reward", "gspo": "grpo"}
"""Name of a script -> its trainer, if the name does not begin with the trainer's."""
RENAMED = {  # fields of earlier versions -> the field of today
    "torch_dtype": "dtype",
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "use_liger": "use_liger_kernel",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
    "dataset_configs": "dataset_config",
}
EARLIER = ("warmup_ratio", "max_prompt_length", "rpo_alpha", "reference_free", "system_prompt", "chat_template")
"""Fields of earlier versions, or of projects that build on TRL, that are translated."""
NULLABLE: dict[str, Any] = {  # fields whose default is null -> a value of their type
    "bf16": True,
    "eval_steps": 1.0,
    "save_total_limit": 1,
    "num_generations_eval": 1,
    "generation_batch_size": 1,
    "steps_per_generation": 1,
    "epsilon_high": 1.0,
    "delta": 1.0,
    "vllm_max_model_length": 1,
    "vllm_importance_sampling_clip_max": 1.0,
    "vllm_importance_sampling_clip_min": 1.0,
    "max_length": 1,
    "max_prompt_length": 1,
    "warmup_ratio": 1.0,
    "rpo_alpha": 1.0,
    "test_split_size": 1.0,
}
SEVERAL_TYPES = ("warmup_steps", "save_steps", "resume_from_checkpoint", "gradient_checkpointing_kwargs", *NULLABLE)
"""Fields that take numbers of two types, or null."""
ACCELERATE = {  # TRL's own files for --accelerate_config and --config_file -> processes
    "single_gpu": 1,
    "multi_gpu": 8,
    "fsdp1": 8,
    "fsdp2": 8,
    "zero1": 8,
    "zero2": 8,
    "zero3": 8,
    "deepspeed_zero1": 8,
    "deepspeed_zero2": 8,
    "deepspeed_zero3": 8,
    "context_parallel_2gpu": 2,
    "alst_ulysses_4gpu": 4,
}


def of(trainer: str) -> dict[str, Any]:
    """Return the defaults of a trainer's fields."""
    return TRAINING | MODEL | SCRIPT | TRAINERS[trainer]


def fields(trainer: str) -> frozenset[str]:
    """Return the fields that only some trainers have, of those that a trainer has."""
    return frozenset((*TRAINERS[trainer], *WITHOUT_EFFECT[trainer].split()))
