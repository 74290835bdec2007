"""Check Megatron-Core's keys, `policy.megatron_cfg`. `pipeline/config/parallelism.py` checks how the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from pipeline.config import fixed_keys
from pipeline.config.megatron import MegatronConfig, MegatronLoRAConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from pipeline.config.policy import PolicyConfig
from pipeline.recipe.problems import Problem

KEY = "policy.megatron_cfg"
FUSED = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""Modules of Megatron that fuse projections -> the names of these parts, in the order of the fused weight's sources."""
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def check_megatron(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for each value that Megatron-Core, or our backend with it, does not support."""
    megatron = policy.megatron_cfg
    if policy.precision == "float16":
        message = "got float16 with Megatron-Core; expected bfloat16 or float32. Try policy.dtensor_cfg.enabled=true, for FSDP2"
        yield Problem("policy.precision", "unsupported", message)
    if megatron.peft.enabled:
        yield from _check_adapters(megatron.peft)
    yield from _check_recompute(megatron)
    if (optimizer := megatron.optimizer) and optimizer.min_lr > optimizer.lr:
        message = f"got {optimizer.min_lr}; expected at most {KEY}.optimizer.lr, {optimizer.lr}"
        yield Problem(f"{KEY}.optimizer.min_lr", "too-large", message)
    if megatron.scheduler is not None:
        if optimizer is None:
            message = (
                f"got a schedule with {KEY}.optimizer=null; expected the optimizer whose rate it sets. Try policy.scheduler"
            )
            yield Problem(f"{KEY}.scheduler", "contradiction", message)
        else:
            yield from _check_scheduler(megatron.scheduler, optimizer)
    known = {field.name for field in fields(MegatronConfig)}
    for name in megatron.model_overrides:
        key = f"{KEY}.model_overrides.{name}"
        if name in known:
            yield Problem(key, "contradiction", f"is also a key of the recipe. Try {KEY}.{name}")
        elif why := fixed_keys.hint(f"{KEY}.{name}"):
            yield Problem(key, "unsupported", f"cannot be set: {why}")


def _check_adapters(peft: MegatronLoRAConfig) -> Iterator[Problem]:
    key = f"{KEY}.peft"
    if peft.target_modules and peft.exclude_modules:
        message = f"got names, and {key}.target_modules has names too; expected only one of the two. Try target_modules=[]"
        yield Problem(f"{key}.exclude_modules", "contradiction", message)
    names = set(peft.target_modules)  # patterns with * are compared with the modules, by the backend
    for fused, parts in FUSED.items():
        if fused in names and (both := sorted(names.intersection(parts))):
            message = (
                f"got {fused} and {both[0]}; expected one of the two: the parts of {fused} share one A, while {both[0]} has a"
                " separate A"
            )
            yield Problem(f"{key}.target_modules", "contradiction", message)
    if peft.use_dora and peft.dropout:
        message = f"got true with {key}.dropout={peft.dropout}; expected 0, since DoRA also scales W's output, without dropout"
        yield Problem(f"{key}.use_dora", "contradiction", message)


def _check_recompute(megatron: MegatronConfig) -> Iterator[Problem]:
    """Yield problems of recomputation keys, such as combinations that TransformerConfig refuses.

    Method and number of layers need granularity "full", and modules need granularity "selective".
    """
    belongs_to = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
    for name, granularity in belongs_to.items():
        if getattr(megatron, name) is not None and megatron.recompute_granularity not in (None, granularity):
            message = (
                f"got a value with {KEY}.recompute_granularity={megatron.recompute_granularity}; expected null, or"
                f" recompute_granularity={granularity}"
            )
            yield Problem(f"{KEY}.{name}", "contradiction", message)
    given = [name for name in belongs_to if getattr(megatron, name)]
    if megatron.recompute_granularity == "selective":
        given.append("recompute_granularity")
    if given and megatron.activation_checkpointing is False:
        message = f"got a value with activation_checkpointing=false; expected null. Try {KEY}.activation_checkpointing=true"
        yield Problem(f"{KEY}.{given[0]}", "has-no-effect", message)
    for name in megatron.recompute_modules or ():
        if name not in RECOMPUTE_MODULES:
            message = f"got '{name}'; expected some of: {', '.join(RECOMPUTE_MODULES)}"
            yield Problem(f"{KEY}.recompute_modules", "not-a-choice", message)


def _check_scheduler(scheduler: MegatronSchedulerConfig, optimizer: MegatronOptimizerConfig) -> Iterator[Problem]:
    key = f"{KEY}.scheduler"
    if scheduler.lr_warmup_init > optimizer.lr:
        message = f"got {scheduler.lr_warmup_init}; expected at most {KEY}.optimizer.lr, {optimizer.lr}"
        yield Problem(f"{key}.lr_warmup_init", "too-large", message)
    warm_up, end = scheduler.lr_warmup_iters, scheduler.lr_decay_iters
    if end is None:
        if scheduler.lr_decay_style != "constant":
            message = f"got null; expected the step at which the {scheduler.lr_decay_style} decay ends"
            yield Problem(f"{key}.lr_decay_iters", "missing-value", message)
    elif warm_up >= end:
        message = f"got {warm_up}; expected fewer than {key}.lr_decay_iters, {end}"
        yield Problem(f"{key}.lr_warmup_iters", "too-large", message)
