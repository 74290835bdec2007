"""What the keys of `policy.megatron_cfg` may hold. How the ranks divide is checked in `layout.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from pipeline.config.megatron import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from pipeline.config.policy import PolicyConfig

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


def check_megatron(policy: PolicyConfig) -> Iterator[str]:
    """A problem for what Megatron-Core, or this backend of it, does not do."""
    megatron = policy.megatron_cfg
    yield from _check_only_defaults(megatron)
    if megatron.pipeline_dtype != policy.precision:
        yield (
            f"{KEY}.pipeline_dtype: {megatron.pipeline_dtype}, but stages pass on activations of policy.precision"
            f" {policy.precision}; leave it out"
        )
    yield from _check_recompute(megatron)
    if megatron.optimizer is not None:
        yield from _check_optimizer(megatron.optimizer, policy.precision)
    if megatron.scheduler is not None:
        if megatron.optimizer is None:
            yield (
                f"{KEY}.scheduler: its rates are those of {KEY}.optimizer, which is null; give that too, or the torch schedule"
                " in policy.scheduler"
            )
        else:
            yield from _check_scheduler(megatron.scheduler, megatron.optimizer)
    known = {field.name for field in fields(MegatronConfig)}
    for name in megatron.model_overrides:
        if name in known:
            yield f"{KEY}.model_overrides.{name}: this has a key of its own: {KEY}.{name}"


def _check_only_defaults(megatron: MegatronConfig) -> Iterator[str]:
    defaults = MegatronConfig(optimizer=MegatronOptimizerConfig(), scheduler=MegatronSchedulerConfig())
    for key, why in ONLY_DEFAULT.items():
        if _section(megatron, key) is None:
            continue
        value, only = _get(megatron, key), _get(defaults, key)
        if value != only:
            yield f"{KEY}.{key}: {_yaml(value)} is not supported, only {_yaml(only)}: {why}"


def _section(megatron: MegatronConfig, key: str) -> object:
    section = key.rpartition(".")[0]
    return getattr(megatron, section) if section else megatron


def _get(megatron: MegatronConfig, key: str) -> object:
    section, name = _section(megatron, key), key.rpartition(".")[2]
    return section.get(name, False) if isinstance(section, dict) else getattr(section, name)


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_recompute(megatron: MegatronConfig) -> Iterator[str]:
    """As TransformerConfig has it: method and number of layers are of "full", modules of "selective"."""
    of = {"full": ("recompute_method", "recompute_num_layers"), "selective": ("recompute_modules",)}
    for granularity, names in of.items():
        for name in names:
            if getattr(megatron, name) is not None and megatron.recompute_granularity != granularity:
                yield (
                    f"{KEY}.{name}: belongs to recompute_granularity={granularity}, which is {megatron.recompute_granularity}"
                )
    given = [name for name in ("recompute_method", "recompute_num_layers", "recompute_modules") if getattr(megatron, name)]
    if megatron.recompute_granularity != "full":
        given.append("recompute_granularity")
    if given and not megatron.activation_checkpointing:
        yield f"{KEY}.{given[0]}: says nothing while {KEY}.activation_checkpointing is false; set that to true"
    for name in megatron.recompute_modules or ():
        if name not in RECOMPUTE_MODULES:
            yield f"{KEY}.recompute_modules: '{name}' is not one of: {', '.join(RECOMPUTE_MODULES)}"


def _check_optimizer(optimizer: MegatronOptimizerConfig, precision: str) -> Iterator[str]:
    key = f"{KEY}.optimizer"
    bf16 = precision == "bfloat16"
    if optimizer.bf16 not in (None, bf16):
        yield f"{key}.bf16: {_yaml(optimizer.bf16)}, but policy.precision is {precision}; leave it out"
    if optimizer.min_lr > optimizer.lr:
        yield f"{key}.min_lr: {optimizer.min_lr} is above {key}.lr {optimizer.lr}"


def _check_scheduler(scheduler: MegatronSchedulerConfig, optimizer: MegatronOptimizerConfig) -> Iterator[str]:
    key = f"{KEY}.scheduler"
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(scheduler, name) not in (None, optimizer.weight_decay):
            yield (
                f"{key}.{name}: {getattr(scheduler, name)} differs from {KEY}.optimizer.weight_decay"
                f" {optimizer.weight_decay}; weight decay does not change, leave it out"
            )
    if scheduler.lr_warmup_init > optimizer.lr:
        yield f"{key}.lr_warmup_init: {scheduler.lr_warmup_init} is above {KEY}.optimizer.lr {optimizer.lr}"
    if scheduler.lr_decay_iters is None:
        if scheduler.lr_decay_style != "constant":
            yield f"{key}.lr_decay_iters: {scheduler.lr_decay_style} must know at which step it ends; give that"
    elif scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        yield (
            f"{key}.lr_warmup_iters: {scheduler.lr_warmup_iters} steps must be fewer than {key}.lr_decay_iters"
            f" {scheduler.lr_decay_iters}"
        )
