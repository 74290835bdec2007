"""Checks Megatron-Core's keys, `policy.megatron_cfg`. `pipeline/config/parallelism.py` checks how the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from pipeline.config.megatron import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from pipeline.config.policy import PolicyConfig
from pipeline.problems import Problem

KEY = "policy.megatron_cfg"
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")

# Keys that may only have their default, each with what to say to another value.
ONLY_DEFAULT = {
    "virtual_pipeline_model_parallel_size": "interleaved pipeline stages are not supported",
    "moe_token_dispatcher_type": "the others do not take sequences of varying length, or need DeepEP",
    "moe_enable_deepep": "DeepEP is not supported",
    "moe_router_load_balancing_type": "a balancing loss would be divided by another count than the policy's loss",
    "moe_aux_loss_coeff": "a balancing loss would be divided by another count than the policy's loss",
    "moe_per_layer_logging": "a router's load is not logged",
    "mtp_num_layers": "multi-token prediction is not trained",
    "mtp_loss_scaling_factor": "multi-token prediction is not trained",
    "mtp_use_repeated_layer": "multi-token prediction is not trained",
    "mtp_detach_heads": "multi-token prediction is not trained",
    "cuda_graph_impl": "packed batches vary in shape from step to step, and a CUDA graph has one",
    "cuda_graph_modules": "CUDA graphs are not supported",
    "cuda_graph_warmup_steps": "CUDA graphs are not supported",
    "fine_grained_activation_offloading": "activation_checkpointing=true with recompute_granularity=selective saves memory too",
    "offload_modules": "activation_checkpointing=true with recompute_granularity=selective saves memory too",
    "use_fused_linear_logprobs": "policy.logprob_chunk_size bounds the memory of logits",
    "fused_linear_logprobs_chunk_size": "policy.logprob_chunk_size bounds the memory of logits",
    "use_fused_weighted_squared_relu": "no supported model family has this activation",
    "use_gloo_process_groups": "groups are gloo's on CPU and NCCL's on GPUs",
    "fp8_cfg.enabled": "training in 8 bits is not supported",
    "peft.enabled": "every weight is trained",
    "optimizer.fp16": "policy.precision=bfloat16 needs no loss scaling",
    "optimizer.params_dtype": "main weights are float32",
    "optimizer.use_distributed_optimizer": "the optimizer's state is always cut over the data ranks",
    "optimizer.optimizer_cpu_offload": "the optimizer's state stays on the GPUs, cut over the data ranks",
    "optimizer.optimizer_offload_fraction": "the optimizer's state stays on the GPUs, cut over the data ranks",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "the optimizer's state stays on the GPUs, cut over the data ranks",
    "scheduler.weight_decay_incr_style": "weight decay does not change",
    "distributed_data_parallel_config.use_custom_fsdp": "policy.dtensor_cfg.enabled=true shards parameters over data ranks",
    "distributed_data_parallel_config.data_parallel_sharding_strategy": "it would say how use_custom_fsdp shards",
    "checkpoint.ckpt_assume_constant_structure": "a run's checkpoints all have the same structure",
}


def check_megatron(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for what Megatron-Core, or this backend of it, does not do."""
    megatron = policy.megatron_cfg
    yield from _check_only_defaults(megatron)
    if megatron.pipeline_dtype != policy.precision:
        told = f"got {megatron.pipeline_dtype}; expected policy.precision, {policy.precision}. Try without it"
        yield Problem(f"{KEY}.pipeline_dtype", "contradiction", told)
    yield from _check_recompute(megatron)
    if megatron.optimizer is not None:
        yield from _check_optimizer(megatron.optimizer, policy.precision)
    if megatron.scheduler is not None:
        if megatron.optimizer is None:
            told = f"got a schedule, but {KEY}.optimizer, whose rate it sets, is null. Try that too, or policy.scheduler"
            yield Problem(f"{KEY}.scheduler", "contradiction", told)
        else:
            yield from _check_scheduler(megatron.scheduler, megatron.optimizer)
    known = {field.name for field in fields(MegatronConfig)}
    for name in megatron.model_overrides:
        if name in known:
            yield Problem(f"{KEY}.model_overrides.{name}", "contradiction", f"has a key of its own. Try {KEY}.{name}")


def _check_only_defaults(megatron: MegatronConfig) -> Iterator[Problem]:
    defaults = MegatronConfig(optimizer=MegatronOptimizerConfig(), scheduler=MegatronSchedulerConfig())
    for key, why in ONLY_DEFAULT.items():
        if _section(megatron, key) is None:
            continue
        value, only = _get(megatron, key), _get(defaults, key)
        if value != only:
            yield Problem(f"{KEY}.{key}", "unsupported", f"got {_yaml(value)}; expected {_yaml(only)}: {why}")


def _section(megatron: MegatronConfig, key: str) -> object:
    section = key.rpartition(".")[0]
    return getattr(megatron, section) if section else megatron


def _get(megatron: MegatronConfig, key: str) -> object:
    section, name = _section(megatron, key), key.rpartition(".")[2]
    return section.get(name, False) if isinstance(section, dict) else getattr(section, name)


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_recompute(megatron: MegatronConfig) -> Iterator[Problem]:
    """Yield what TransformerConfig refuses: method and number of layers are of "full", modules of "selective"."""
    of = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
    for name, granularity in of.items():
        if getattr(megatron, name) is not None and megatron.recompute_granularity != granularity:
            told = f"got a value with {KEY}.recompute_granularity={megatron.recompute_granularity}; expected {granularity}"
            yield Problem(f"{KEY}.{name}", "contradiction", told)
    given = [name for name in of if getattr(megatron, name)]
    if megatron.recompute_granularity != "full":
        given.append("recompute_granularity")
    if given and not megatron.activation_checkpointing:
        told = f"got a value, but nothing is recomputed. Try {KEY}.activation_checkpointing=true"
        yield Problem(f"{KEY}.{given[0]}", "has-no-effect", told)
    for name in megatron.recompute_modules or ():
        if name not in RECOMPUTE_MODULES:
            told = f"got '{name}'; expected some of: {', '.join(RECOMPUTE_MODULES)}"
            yield Problem(f"{KEY}.recompute_modules", "not-a-choice", told)


def _check_optimizer(optimizer: MegatronOptimizerConfig, precision: str) -> Iterator[Problem]:
    key, bf16 = f"{KEY}.optimizer", precision == "bfloat16"
    if optimizer.bf16 not in (None, bf16):
        told = f"got {_yaml(optimizer.bf16)} with policy.precision={precision}; expected {_yaml(bf16)}. Try without it"
        yield Problem(f"{key}.bf16", "contradiction", told)
    if optimizer.min_lr > optimizer.lr:
        yield Problem(f"{key}.min_lr", "too-large", f"got {optimizer.min_lr}; expected at most {key}.lr, {optimizer.lr}")


def _check_scheduler(scheduler: MegatronSchedulerConfig, optimizer: MegatronOptimizerConfig) -> Iterator[Problem]:
    key, decay = f"{KEY}.scheduler", optimizer.weight_decay
    for name in ("start_weight_decay", "end_weight_decay"):
        if (given := getattr(scheduler, name)) not in (None, decay):
            told = f"got {given}; expected {KEY}.optimizer.weight_decay, {decay}, which does not change. Try without it"
            yield Problem(f"{key}.{name}", "unsupported", told)
    if scheduler.lr_warmup_init > optimizer.lr:
        told = f"got {scheduler.lr_warmup_init}; expected at most {KEY}.optimizer.lr, {optimizer.lr}"
        yield Problem(f"{key}.lr_warmup_init", "too-large", told)
    warm_up, end = scheduler.lr_warmup_iters, scheduler.lr_decay_iters
    if end is None:
        if scheduler.lr_decay_style != "constant":
            told = f"got null; expected the step at which the {scheduler.lr_decay_style} decay ends"
            yield Problem(f"{key}.lr_decay_iters", "missing-value", told)
    elif warm_up >= end:
        told = f"got {warm_up}; expected fewer than {key}.lr_decay_iters, {end}"
        yield Problem(f"{key}.lr_warmup_iters", "too-large", told)
