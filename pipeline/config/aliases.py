"""Names that other libraries have for our keys.

The names are only suggested, never accepted: `lr=1e-4` is an error that names `policy.optimizer.kwargs.lr`. They come from TRL
and Hugging Face's trainers, verl, OpenRLHF, and from NeMo-RL where its names differ from ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from pipeline.algorithms import ALGORITHMS, OFFLINE, ONLINE

OWN = "<algorithm>"  # placeholder for the section of the recipe's algorithm

_NAMES = """
policy.optimizer.kwargs.lr policy.megatron_cfg.optimizer.lr: lr learning_rate actor_learning_rate max_lr
value.optimizer.kwargs.lr: value.lr value.optimizer.lr critic.optim.lr critic_learning_rate
policy.optimizer.kwargs.weight_decay policy.megatron_cfg.optimizer.weight_decay: weight_decay
policy.optimizer.kwargs.betas: betas adam_betas adam_beta1 adam_beta2
policy.optimizer.kwargs.eps policy.megatron_cfg.optimizer.adam_eps: eps adam_epsilon adam_eps optimizer.epsilon
policy.scheduler policy.megatron_cfg.scheduler.lr_warmup_iters: warmup_steps lr_warmup_steps warmup_ratio lr_warmup_iters
policy.scheduler policy.megatron_cfg.scheduler.lr_warmup_iters: lr_warmup_steps_ratio
policy.scheduler policy.megatron_cfg.scheduler.lr_decay_style: lr_scheduler_type lr_scheduler lr_schedule lr_decay_style
policy.scheduler policy.megatron_cfg.scheduler.lr_decay_style: warmup_style
policy.optimizer.kwargs.betas: betas1 betas2
policy.optimizer.kwargs.momentum: momentum mu muon_momentum momentum_beta
policy.optimizer.kwargs.nesterov: nesterov muon_nesterov muon_use_nesterov
policy.optimizer.kwargs.ns_steps: muon_num_ns_steps num_ns_steps
policy.optimizer.kwargs.adjust_lr_fn: muon_scale_mode muon_extra_scale_factor adjust_lr
policy.optimizer.name: optim optimizer
policy.moe_aux_loss_coeff: router_aux_loss_coef router_aux_loss_coeff aux_loss_coef aux_loss_alpha
policy.max_grad_norm: grad_clip clip_grad max_norm gradient_clip_val
policy.train_global_batch_size: batch_size global_batch_size train.global_batch_size train_batch_size mini_batch_size
policy.train_global_batch_size: ppo_mini_batch_size gradient_accumulation_steps
policy.train_micro_batch_size: micro_batch_size per_device_train_batch_size micro_train_batch_size ppo_micro_batch_size
policy.train_micro_batch_size: ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu
<algorithm>.num_prompts_per_step policy.train_global_batch_size: data.train_batch_size rollout_batch_size num_prompts
<algorithm>.num_prompts_per_step policy.train_global_batch_size: prompts_per_step
policy.sequence_packing.enabled: packing dynamic_batching.enabled use_dynamic_bsz
<algorithm>.max_num_steps: max_steps num_steps total_training_steps total_steps steps
<algorithm>.max_num_epochs: num_train_epochs num_epochs total_epochs epochs max_epochs
<algorithm>.val_period: eval_steps test_freq eval_period eval_interval val_interval
checkpointing.save_period: save_steps save_freq save_interval
checkpointing.keep_top_k: save_total_limit max_actor_ckpt_to_keep
<algorithm>.seed: seed data_seed
<algorithm>.num_generations_per_prompt: num_generations rollout.n n_samples_per_prompt n_samples group_size
policy.generation.max_new_tokens: max_completion_length max_response_length max_tokens response_length generate_max_len
data.max_input_seq_length: max_prompt_length prompt_max_len prompt_length
policy.max_total_sequence_length: max_length max_seq_length max_seq_len seq_length sequence_length max_len
policy.generation.temperature: temperature
policy.generation.top_p: top_p
policy.generation.top_k: top_k
policy.generation.stop_token_ids: stop_token_ids
policy.generation.stop_strings: stop_strings stop_string stop until stop_words
<algorithm>.max_rollout_turns: max_rollout_turns
policy.generation.vllm_cfg.gpu_memory_utilization: gpu_memory_utilization vllm_gpu_memory_utilization
policy.dtensor_cfg.tensor_parallel_size policy.megatron_cfg.tensor_model_parallel_size: tensor_model_parallel_size
policy.dtensor_cfg.tensor_parallel_size policy.megatron_cfg.tensor_model_parallel_size: tensor_parallel_size tp_size tp
policy.generation.vllm_cfg.tensor_parallel_size: vllm_tensor_parallel_size rollout.tensor_model_parallel_size
policy.max_total_sequence_length policy.generation.vllm_cfg.max_model_len: vllm_max_model_length max_model_len max_model_length
policy.generation.vllm_cfg.enforce_eager: enforce_eager
policy.generation.max_num_seqs: generation_batch_size
loss_fn.reference_policy_kl_penalty dpo.reference_policy_kl_penalty: kl_loss_coef init_kl_coef kl_penalty kl_weight
loss_fn.reference_policy_kl_penalty dpo.reference_policy_kl_penalty kto.reference_policy_kl_penalty: beta kl_coef kl_beta
loss_fn.ratio_clip_min loss_fn.ratio_clip_max: epsilon cliprange clip_ratio eps_clip clip_range epsilon_low clip_ratio_low
loss_fn.ratio_clip_max: epsilon_high clip_ratio_high eps_clip_high
loss_fn.ratio_clip_c: delta clip_ratio_c
loss_fn.entropy_coeff: entropy_coef ent_coef
grpo.normalize_rewards: scale_rewards
<algorithm>.overlong_filtering: mask_truncated_completions
<algorithm>.malformed_turn_penalty: invalid_action_penalty_coef
ppo.ppo_epochs policy.train_global_batch_size: num_iterations num_ppo_epochs
ppo.adv_estimator.gae_gamma: gamma adv_estimator.gamma
ppo.adv_estimator.gae_lambda: lam gae_lambda lambd
grpo.adv_estimator.name algorithm: adv_estimator
grpo.adv_estimator.name: multi_objective_aggregation
loss_fn.token_level_loss dpo.preference_loss kto.preference_loss: loss_type
loss_fn.sequence_level_importance_ratios: importance_sampling_level
dpo.label_smoothing: label_smoothing
policy.model_name: model model_name model_name_or_path model_path model.path pretrain base_model
policy.tokenizer.name: tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path
teacher.model_name: teacher_model teacher_model_name_or_path teacher_model_path
teacher.tokenizer.name: teacher_tokenizer_name_or_path
policy.tokenizer.chat_template: chat_template chat_template_path
policy.precision: dtype torch_dtype bf16 fp16 mixed_precision
policy.dtensor_cfg.activation_checkpointing policy.megatron_cfg.activation_checkpointing: gradient_checkpointing
policy.dtensor_cfg.activation_checkpointing policy.megatron_cfg.activation_checkpointing: activation_checkpointing
policy.dtensor_cfg.activation_checkpointing policy.megatron_cfg.activation_checkpointing: enable_gradient_checkpointing
policy.dtensor_cfg.use_liger_kernel: use_liger_kernel use_liger liger_kernel
policy.dtensor_cfg.compile: torch_compile use_torch_compile
policy.dtensor_cfg.lora_cfg.enabled: use_peft use_lora lora
policy.dtensor_cfg.lora_cfg.dim: lora_r lora_rank lora_cfg.r
policy.dtensor_cfg.lora_cfg.alpha: lora_alpha
policy.dtensor_cfg.lora_cfg.target_modules: lora_target_modules target_modules
data.train.dataset_name data.train.data_path: dataset dataset_name datasets
data.train.data_path: train_files train_file data_path train_data prompt_data train_path
data.validation.data_path data.validation.dataset_name: val_files val_file eval_dataset validation_file test_file val_path
data.train.subset: dataset_config dataset_config_name subset
data.train.split: dataset_train_split split
data.train.input_key: prompt_key input_key dataset_text_field
data.train.output_key: label_key answer_key output_key
data.train.prompt_file: prompt_file
data.train.system_prompt_file: system_prompt system_prompt_file
data.shuffle: shuffle_dataset
env.NAME.rewards env.NAME.kind: reward_funcs
env.NAME.kind: reward_fn reward_function custom_reward_function.path remote_rm_url custom_reward_function.name
env.NAME.kind: reward_func reward
env.NAME.rewards: reward_weights gdpo_reward_weights gdpo_reward_keys
env.NAME.model_name env.NAME.kind: reward_model reward_model_path reward_pretrain reward_model.path
run_dir: output_dir checkpoint_dir default_local_dir log_dir logging_dir save_path
name: run_name experiment_name exp_name
cluster.train.nodes cluster.generate.nodes: num_nodes nnodes nodes
cluster.train.gpus_per_node cluster.generate.gpus_per_node: gpus_per_node n_gpus_per_node num_gpus_per_node num_gpus gpus
cluster.time_min: time time_limit walltime
cluster.train.partition cluster.generate.partition: partition
cluster.train.account cluster.generate.account: account
cluster.train.qos cluster.generate.qos: qos
cluster.executor: executor
policy.generation.colocated.enabled: colocate vllm_mode
"""
ALIASES: dict[str, tuple[str, ...]] = {
    name: tuple(keys.split())
    for keys, names in (line.split(": ") for line in _NAMES.strip().splitlines())
    for name in names.split()
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


def option(name: str, options: Iterable[str]) -> str | None:
    """Return the option of a library's class that an unknown option means: by another library's name for it, or by spelling.

    None if there is none. Worked example: `learning_rat` means `lr`, since `learning_rate` is another library's name for it.
    """
    options = list(options)
    ends = {alias: [key.rpartition(".")[2] for key in keys] for alias, keys in ALIASES.items()}
    meanings = {alias: next((end for end in known if end in options), None) for alias, known in ends.items()}
    meanings = {alias: end for alias, end in meanings.items() if end}
    if near := difflib.get_close_matches(name, meanings, 1, 0.85):
        return meanings[near[0]]
    return next(iter(difflib.get_close_matches(name, options, 1)), None)


def _in_section(key: str, algorithm: str) -> str:
    """Return the key in the algorithm's own section if it derives from the algorithm that `key` belongs to, else `key`."""
    section, _, rest = key.partition(".")
    derives = section in ALGORITHMS and issubclass(ALGORITHMS[algorithm], ALGORITHMS[section])
    return f"{algorithm}.{rest}" if derives else key


def _best(keys: Iterable[str], rank: Callable[[str], int]) -> list[str]:
    ordered = sorted(keys, key=rank)  # stable
    return [key for key in ordered if rank(key) == rank(ordered[0])][:2]
