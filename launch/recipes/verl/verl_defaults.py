"""verl's defaults of the keys that are translated, by the file of verl/trainer/config that has them.

`tests/foreign/test_verl_golden.py` compares the table with what Hydra composes from a clone of verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))

FSDP_OPTIMIZER: dict[str, Any] = {  # optim/fsdp.yaml
    "optimizer": "AdamW",
    "optimizer_impl": "torch.optim",
    "lr": 1e-3,
    "lr_warmup_steps_ratio": 0.0,
    "total_training_steps": -1,
    "weight_decay": 0.01,
    "lr_warmup_steps": -1,
    "betas": [0.9, 0.999],
    "clip_grad": 1.0,
    "min_lr_ratio": 0.0,
    "num_cycles": 0.5,
    "lr_scheduler_type": "constant",
    "zero_indexed_step": True,
    "warmup_style": None,
    "override_optimizer_config": None,
}
MEGATRON_OPTIMIZER: dict[str, Any] = {  # optim/megatron.yaml
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_warmup_steps_ratio": 0.0,
    "total_training_steps": -1,
    "weight_decay": 0.01,
    "lr_warmup_steps": -1,
    "betas": [0.9, 0.999],
    "clip_grad": 1.0,
    "lr_warmup_init": 0.0,
    "lr_decay_steps": None,
    "lr_decay_style": "constant",
    "min_lr": 0.0,
    "weight_decay_incr_style": "constant",
}
FSDP_ENGINE: dict[str, Any] = {  # engine/fsdp.yaml
    "fsdp_size": -1,
    "model_dtype": "fp32",
    "dtype": "bfloat16",
    "offload_policy": False,
    "ulysses_sequence_parallel_size": 1,
}
MEGATRON_ENGINE: dict[str, Any] = {  # engine/megatron.yaml
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "dtype": "bfloat16",
}
HF_MODEL: dict[str, Any] = {  # model/hf_model.yaml
    "path": "~/models/deepseek-llm-7b-chat",
    "tokenizer_path": None,
    "custom_chat_template": None,
    "enable_gradient_checkpointing": True,
    "lora_rank": 0,
    "lora_alpha": 16,
    "target_modules": "all-linear",
    "exclude_modules": None,
    "use_liger": False,
}
PPO: dict[str, Any] = {
    **{  # actor/actor.yaml
        f"{ACTOR}.{key}": value
        for key, value in {
            "ppo_mini_batch_size": 256,
            "ppo_micro_batch_size_per_gpu": None,
            "use_dynamic_bsz": False,
            "ppo_max_token_len_per_gpu": 16384,
            "clip_ratio": 0.2,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "clip_ratio_c": 3.0,
            "policy_loss.loss_mode": "vanilla",
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
            "entropy_coeff": 0,
            "calculate_entropy": False,
            "use_kl_loss": False,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "ppo_epochs": 1,
            "shuffle": False,
            "checkpoint.async_save": False,
        }.items()
    },
    **{  # rollout/rollout.yaml
        f"{ROLLOUT}.{key}": value
        for key, value in {
            "n": 1,
            "nnodes": 0,
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1,
            "gpu_memory_utilization": 0.5,
            "ignore_eos": False,
            "enforce_eager": False,
            "tensor_model_parallel_size": 2,
            "data_parallel_size": 1,
            "expert_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "max_num_batched_tokens": 8192,
            "max_model_len": None,
            "max_num_seqs": 256,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "log_prob_micro_batch_size_per_gpu": None,
            "quantization": None,
            "val_kwargs.top_k": -1,
            "val_kwargs.top_p": 1.0,
            "val_kwargs.temperature": 0,
            "val_kwargs.n": 1,
            "multi_turn.enable": False,
        }.items()
    },
    **{  # data/legacy_data.yaml
        f"data.{key}": value
        for key, value in {
            "train_files": "~/data/rlhf/gsm8k/train.parquet",
            "val_files": "~/data/rlhf/gsm8k/test.parquet",
            "train_max_samples": -1,
            "val_max_samples": -1,
            "prompt_key": "prompt",
            "max_prompt_length": 512,
            "max_response_length": 512,
            "train_batch_size": 1024,
            "gen_batch_size": None,
            "shuffle": True,
            "seed": None,
            "filter_overlong_prompts": False,
            "truncation": "error",
        }.items()
    },
    # ppo_trainer.yaml, ppo_megatron_trainer.yaml
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is": None,  # algorithm/rollout_correction.yaml
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
    "trainer.max_actor_ckpt_to_keep": None,
    "reward.custom_reward_function.path": None,  # reward/reward.yaml
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.name": "naive",
}
PPO_OF_ENGINE: dict[str, dict[str, Any]] = {
    "dp": {
        f"{ACTOR}.strategy": "fsdp",  # actor/dp_actor.yaml
        f"{ACTOR}.grad_clip": 1.0,
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
        **{f"{ACTOR}.fsdp_config.{key}": value for key, value in FSDP_ENGINE.items()},
        **{f"{ACTOR}.optim.{key}": value for key, value in (FSDP_OPTIMIZER | {"lr": 1e-6}).items()},
    },
    "megatron": {
        f"{ACTOR}.strategy": "megatron",  # actor/megatron_actor.yaml
        **{f"{ACTOR}.megatron.{key}": value for key, value in MEGATRON_ENGINE.items()},
        **{f"{ACTOR}.optim.{key}": value for key, value in (MEGATRON_OPTIMIZER | {"lr": 1e-6}).items()},
    },
}
CRITIC: dict[str, dict[str, Any]] = {  # critic/critic.yaml, dp_critic.yaml, megatron_critic.yaml
    "dp": {
        "critic.cliprange_value": 0.5,
        "critic.grad_clip": 1.0,
        **{f"critic.optim.{key}": value for key, value in (FSDP_OPTIMIZER | {"lr": 1e-5}).items()},
    },
    "megatron": {
        "critic.cliprange_value": 0.5,
        **{f"critic.optim.{key}": value for key, value in (MEGATRON_OPTIMIZER | {"lr": 1e-5}).items()},
    },
}
SFT: dict[str, Any] = {  # sft_trainer_engine.yaml
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "data.train_files": "~/data/gsm8k/train.parquet",
    "data.val_files": None,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.messages_key": "messages",
    "data.tools_key": "tools",
    "data.max_length": 1024,
    "data.truncation": "error",
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.total_training_steps": None,
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    **{f"model.{key}": value for key, value in HF_MODEL.items()},
}
SFT_OF_ENGINE: dict[str, dict[str, Any]] = {
    "dp": {f"engine.{key}": value for key, value in FSDP_ENGINE.items()}
    | {f"optim.{key}": value for key, value in FSDP_OPTIMIZER.items()},
    "megatron": {f"engine.{key}": value for key, value in MEGATRON_ENGINE.items()}
    | {f"optim.{key}": value for key, value in MEGATRON_OPTIMIZER.items()},
}


def of(kind: str, engine: str) -> Mapping[str, Any]:
    """Return dotted key -> default of verl.trainer.main_ppo (kind ppo) or sft_trainer (sft). engine: dp (FSDP) or megatron."""
    if kind == "sft":
        return SFT | SFT_OF_ENGINE[engine]
    return PPO | PPO_OF_ENGINE[engine] | CRITIC[engine] | {f"{MODEL}.{key}": value for key, value in HF_MODEL.items()}
