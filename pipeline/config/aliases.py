"""Names that other libraries have for our keys.

The names are only suggested, never accepted: `lr=1e-4` is an error that names `policy.optimizer.kwargs.lr`. They come from TRL
and Hugging Face's trainers, verl, OpenRLHF, and from NeMo-RL where its names differ from ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from pipeline.algorithms import ALGORITHMS, OFFLINE, ONLINE

OWN = "<algorithm>"  # placeholder for the section of the recipe's algorithm

LR = ("policy.optimizer.kwargs.lr", "policy.megatron_cfg.optimizer.lr")
WEIGHT_DECAY = ("policy.optimizer.kwargs.weight_decay", "policy.megatron_cfg.optimizer.weight_decay")
BETAS = ("policy.optimizer.kwargs.betas",)
EPS = ("policy.optimizer.kwargs.eps", "policy.megatron_cfg.optimizer.adam_eps")
WARM_UP = ("policy.scheduler", "policy.megatron_cfg.scheduler.lr_warmup_iters")
DECAY = ("policy.scheduler", "policy.megatron_cfg.scheduler.lr_decay_style")
BATCH = ("policy.train_global_batch_size",)
MICRO_BATCH = ("policy.train_micro_batch_size",)
PROMPTS = (f"{OWN}.num_prompts_per_step", "policy.train_global_batch_size")
GENERATIONS = (f"{OWN}.num_generations_per_prompt",)
STEPS = (f"{OWN}.max_num_steps",)
EPOCHS = (f"{OWN}.max_num_epochs",)
VALIDATE = (f"{OWN}.val_period",)
ANSWER = ("policy.generation.max_new_tokens",)
PROMPT = ("data.max_input_seq_length",)
WINDOW = ("policy.max_total_sequence_length",)
KL = ("loss_fn.reference_policy_kl_penalty", "dpo.reference_policy_kl_penalty")
MODEL = ("policy.model_name",)
TOKENIZER = ("policy.tokenizer.name",)
DATA = ("data.train.dataset_name", "data.train.data_path")
FILE = ("data.train.data_path",)
VALIDATION = ("data.validation.data_path", "data.validation.dataset_name")
FOLDER = ("run_dir",)
NODES = ("cluster.train.nodes", "cluster.generate.nodes")
GPUS = ("cluster.train.gpus_per_node", "cluster.generate.gpus_per_node")
ENGINE = "policy.generation.vllm_cfg"
TENSOR = ("policy.dtensor_cfg.tensor_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size")
RECOMPUTE = ("policy.dtensor_cfg.activation_checkpointing", "policy.megatron_cfg.activation_checkpointing")
LORA = "policy.dtensor_cfg.lora_cfg"
JUDGE = ("env.NAME.kind",)

ALIASES: dict[str, tuple[str, ...]] = {
    # the optimizer and its schedule
    **dict.fromkeys(("lr", "learning_rate", "actor_learning_rate", "max_lr"), LR),
    **dict.fromkeys(
        ("value.lr", "value.optimizer.lr", "critic.optim.lr", "critic_learning_rate"), ("value.optimizer.kwargs.lr",)
    ),
    "weight_decay": WEIGHT_DECAY,
    **dict.fromkeys(("betas", "adam_betas", "adam_beta1", "adam_beta2"), BETAS),
    **dict.fromkeys(("eps", "adam_epsilon", "adam_eps", "optimizer.epsilon"), EPS),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "warmup_ratio", "lr_warmup_iters", "lr_warmup_steps_ratio"), WARM_UP),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_schedule", "lr_decay_style", "warmup_style"), DECAY),
    **dict.fromkeys(("optim", "optimizer"), ("policy.optimizer.name",)),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_norm", "gradient_clip_val"), ("policy.max_grad_norm",)),
    # batches
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "train.global_batch_size", "train_batch_size", "mini_batch_size"), BATCH
    ),
    **dict.fromkeys(("ppo_mini_batch_size", "gradient_accumulation_steps"), BATCH),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size", "micro_train_batch_size"), MICRO_BATCH),
    **dict.fromkeys(("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"), MICRO_BATCH),
    **dict.fromkeys(("data.train_batch_size", "rollout_batch_size", "num_prompts", "prompts_per_step"), PROMPTS),
    "packing": ("policy.sequence_packing.enabled",),
    **dict.fromkeys(("dynamic_batching.enabled", "use_dynamic_bsz"), ("policy.sequence_packing.enabled",)),
    # steps and periods
    **dict.fromkeys(("max_steps", "num_steps", "total_training_steps", "total_steps", "steps"), STEPS),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "epochs", "max_epochs"), EPOCHS),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_period", "eval_interval", "val_interval"), VALIDATE),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), ("checkpointing.save_period",)),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), ("checkpointing.keep_top_k",)),
    **dict.fromkeys(("seed", "data_seed"), (f"{OWN}.seed",)),
    # sampling
    **dict.fromkeys(("num_generations", "rollout.n", "n_samples_per_prompt", "n_samples", "group_size"), GENERATIONS),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "max_tokens", "response_length", "generate_max_len"), ANSWER
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "prompt_length"), PROMPT),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "seq_length", "sequence_length", "max_len"), WINDOW),
    **{name: (f"policy.generation.{name}",) for name in ("temperature", "top_p", "top_k", "stop_token_ids")},
    **dict.fromkeys(("stop_strings", "stop_string", "stop", "until", "stop_words"), ("policy.generation.stop_strings",)),
    "max_rollout_turns": (f"{OWN}.max_rollout_turns",),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), (f"{ENGINE}.gpu_memory_utilization",)),
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size", "tp_size", "tp"), TENSOR),
    **dict.fromkeys(("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"), (f"{ENGINE}.tensor_parallel_size",)),
    **dict.fromkeys(("vllm_max_model_length", "max_model_len", "max_model_length"), (*WINDOW, f"{ENGINE}.max_model_len")),
    "enforce_eager": (f"{ENGINE}.enforce_eager",),
    "generation_batch_size": ("policy.generation.max_num_seqs",),
    # losses
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_penalty", "kl_weight", "kl_beta"), KL),
    **dict.fromkeys(
        ("epsilon", "cliprange", "clip_ratio", "eps_clip", "clip_range", "epsilon_low", "clip_ratio_low"),
        ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
    ),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), ("loss_fn.ratio_clip_max",)),
    **dict.fromkeys(("delta", "clip_ratio_c"), ("loss_fn.ratio_clip_c",)),
    **dict.fromkeys(("entropy_coef", "ent_coef"), ("loss_fn.entropy_coeff",)),
    "scale_rewards": ("grpo.normalize_rewards",),
    "mask_truncated_completions": (f"{OWN}.overlong_filtering",),
    **dict.fromkeys(("num_iterations", "num_ppo_epochs"), ("ppo.ppo_epochs", "policy.train_global_batch_size")),
    **dict.fromkeys(("gamma", "adv_estimator.gamma"), ("ppo.adv_estimator.gae_gamma",)),
    **dict.fromkeys(("lam", "gae_lambda", "lambd"), ("ppo.adv_estimator.gae_lambda",)),
    "adv_estimator": ("grpo.adv_estimator.name", "algorithm"),
    "loss_type": ("loss_fn.token_level_loss", "dpo.preference_loss"),
    "importance_sampling_level": ("loss_fn.sequence_level_importance_ratios",),
    "label_smoothing": ("dpo.label_smoothing",),
    # models
    **dict.fromkeys(("model", "model_name", "model_name_or_path", "model_path", "model.path", "pretrain", "base_model"), MODEL),
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"), TOKENIZER),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "teacher_model_path"), ("teacher.model_name",)),
    **dict.fromkeys(("chat_template", "chat_template_path"), ("policy.tokenizer.chat_template",)),
    **dict.fromkeys(("dtype", "torch_dtype", "bf16", "fp16", "mixed_precision"), ("policy.precision",)),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "enable_gradient_checkpointing"), RECOMPUTE),
    **dict.fromkeys(("use_liger_kernel", "use_liger", "liger_kernel"), ("policy.dtensor_cfg.use_liger_kernel",)),
    **dict.fromkeys(("torch_compile", "use_torch_compile"), ("policy.dtensor_cfg.compile",)),
    **dict.fromkeys(("use_peft", "use_lora", "lora"), (f"{LORA}.enabled",)),
    **dict.fromkeys(("lora_r", "lora_rank", "lora_cfg.r"), (f"{LORA}.dim",)),
    "lora_alpha": (f"{LORA}.alpha",),
    **dict.fromkeys(("lora_target_modules", "target_modules"), (f"{LORA}.target_modules",)),
    # data and rewards
    **dict.fromkeys(("dataset", "dataset_name", "datasets"), DATA),
    **dict.fromkeys(("train_files", "train_file", "data_path", "train_data", "prompt_data", "train_path"), FILE),
    **dict.fromkeys(("val_files", "val_file", "eval_dataset", "validation_file", "test_file", "val_path"), VALIDATION),
    **dict.fromkeys(("dataset_config", "dataset_config_name", "subset"), ("data.train.subset",)),
    **dict.fromkeys(("dataset_train_split", "split"), ("data.train.split",)),
    **dict.fromkeys(("prompt_key", "input_key", "dataset_text_field"), ("data.train.input_key",)),
    **dict.fromkeys(("label_key", "answer_key", "output_key"), ("data.train.output_key",)),
    "prompt_file": ("data.train.prompt_file",),
    **dict.fromkeys(("system_prompt", "system_prompt_file"), ("data.train.system_prompt_file",)),
    "shuffle_dataset": ("data.shuffle",),
    **dict.fromkeys(("reward_funcs", "reward_fn", "reward_function", "custom_reward_function.path", "remote_rm_url"), JUDGE),
    **dict.fromkeys(("custom_reward_function.name", "reward_func", "reward"), JUDGE),
    **dict.fromkeys(
        ("reward_model", "reward_model_path", "reward_pretrain", "reward_model.path"), ("env.NAME.model_name", *JUDGE)
    ),
    # the cluster and the output
    **dict.fromkeys(("output_dir", "checkpoint_dir", "default_local_dir", "log_dir", "logging_dir", "save_path"), FOLDER),
    **dict.fromkeys(("run_name", "experiment_name", "exp_name"), ("name",)),
    **dict.fromkeys(("num_nodes", "nnodes", "nodes"), NODES),
    **dict.fromkeys(("gpus_per_node", "n_gpus_per_node", "num_gpus_per_node", "num_gpus", "gpus"), GPUS),
    **dict.fromkeys(("time", "time_limit", "walltime"), ("cluster.time_min",)),
    **{name: (f"cluster.train.{name}", f"cluster.generate.{name}") for name in ("partition", "account", "qos")},
    "executor": ("cluster.executor",),
    "colocate": ("policy.generation.colocated.enabled",),
    "vllm_mode": ("policy.generation.colocated.enabled",),
}
"""Suffix of a dotted key, in lower case with underscores -> our keys. The longest matching suffix counts, and of its keys the
first that the recipe reads."""

CURVES = (
    "metrics.jsonl and TensorBoard (logger.tensorboard_enabled) hold the curves, and launch/report.py renders them as a page"
)
TRACKED = "try logger.wandb_enabled=true, logger.mlflow_enabled=true or logger.trackio_enabled=true, or leave it out"
NOT_HERE = (
    (r"wandb|mlflow|trackio|^report_to$|(^|\.)(project_name|logger)$", TRACKED),
    (r"swanlab|comet", f"this service is not supported; {CURVES}; {TRACKED}"),
    (
        r"(^|\.)resume(_mode|_from_checkpoint|_from_path)?$",
        "the same command continues from the last checkpoint in run_dir; leave it out",
    ),
    (r"deepspeed|(^|[._])fsdp", "the backends are policy.dtensor_cfg (FSDP2) and policy.megatron_cfg; leave it out"),
    (r"(^|\.)use_vllm$", "policy.generation.backend is vllm unless the recipe says otherwise; leave it out"),
    (r"(^|\.)logging_steps$", "every step is logged; leave it out"),
)
"""Patterns of dotted keys without an equivalent here, and what to do instead."""


def hint(
    key: str, algorithm: str | None, rank: Callable[[str], int], unread: Callable[[str], str | None] = lambda key: None
) -> str | None:
    """Return a hint for `key`, which the schema lacks; None if it is no known key of another library.

    algorithm: of the recipe; None if unknown. rank: a function from one of our keys to its rank as a suggestion, lowest first.
    unread: a function from one of our keys to the reason why the recipe does not read it; None if it does.
    """
    key = key.lower().replace("-", "_")
    if keys := equivalents(key, algorithm, rank):
        if why := unread(keys[0]):
            return f"its name here is '{equivalents(key, ONLINE[0], rank)[0]}', but {why}; leave it out"
        return f"did you mean {' or '.join(repr(one) for one in keys)}?"
    return next((instead for pattern, instead in NOT_HERE if re.search(pattern, key)), None)


def equivalents(key: str, algorithm: str | None, rank: Callable[[str], int]) -> list[str]:
    """Return at most two of our keys for another library's key: the first two of those that have the lowest rank."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((ALIASES[end] for end in ends if end in ALIASES), ())
    section = algorithm if algorithm in (*ONLINE, *OFFLINE) else ONLINE[0]
    return _best([_in_section(one.replace(OWN, section), section) for one in found], rank)


def _in_section(key: str, algorithm: str) -> str:
    """Return the key in the algorithm's own section if it derives from the algorithm that `key` belongs to, else `key`."""
    section, _, rest = key.partition(".")
    derives = section in ALGORITHMS and issubclass(ALGORITHMS[algorithm], ALGORITHMS[section])
    return f"{algorithm}.{rest}" if derives else key


def _best(keys: Iterable[str], rank: Callable[[str], int]) -> list[str]:
    ordered = sorted(keys, key=rank)  # stable
    return [key for key in ordered if rank(key) == rank(ordered[0])][:2]
