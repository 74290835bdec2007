"""Check Megatron-Core's keys, `policy.megatron_cfg`. `pipeline/config/parallelism.py` checks how the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

from pipeline.config.megatron import (
    MegatronConfig,
    MegatronLoRAConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    OnlyDefault,
)
from pipeline.config.policy import PolicyConfig
from pipeline.recipe.problems import Problem

KEY = "policy.megatron_cfg"
FUSED = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}
"""Modules of Megatron that fuse projections -> the names of these parts, in the order of the fused weight's sources."""
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def check_megatron(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for each value that Megatron-Core, or our backend with it, does not support."""
    megatron = policy.megatron_cfg
    yield from _check_only_defaults(megatron, KEY)
    if (enabled := megatron.fp8_cfg.get("enabled", False)) is not False:
        message = f"got {_yaml(enabled)}; expected false: training in 8 bits is not supported"
        yield Problem(f"{KEY}.fp8_cfg.enabled", "unsupported", message)
    if policy.precision == "float16":
        message = "got float16 with Megatron-Core; expected bfloat16 or float32. Try policy.dtensor_cfg.enabled=true, for FSDP2"
        yield Problem("policy.precision", "unsupported", message)
    if megatron.peft.enabled:
        yield from _check_adapters(megatron.peft, policy.precision)
    if megatron.pipeline_dtype != policy.precision:
        message = f"got {megatron.pipeline_dtype}; expected policy.precision, {policy.precision}. Try without it"
        yield Problem(f"{KEY}.pipeline_dtype", "contradiction", message)
    yield from _check_recompute(megatron)
    if megatron.optimizer is not None:
        yield from _check_optimizer(megatron.optimizer, policy.precision)
    if megatron.scheduler is not None:
        if megatron.optimizer is None:
            message = (
                f"got a schedule with {KEY}.optimizer=null; expected the optimizer whose rate it sets. Try policy.scheduler"
            )
            yield Problem(f"{KEY}.scheduler", "contradiction", message)
        else:
            yield from _check_scheduler(megatron.scheduler, megatron.optimizer)
    known = {field.name for field in fields(MegatronConfig)}
    for name in megatron.model_overrides:
        if name in known:
            yield Problem(f"{KEY}.model_overrides.{name}", "contradiction", f"is also a key of the recipe. Try {KEY}.{name}")


def _check_adapters(peft: MegatronLoRAConfig, precision: str) -> Iterator[Problem]:
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
    if peft.lora_dtype not in (None, "None", precision):
        message = f"got {peft.lora_dtype}; expected null or policy.precision, {precision}. Try without it"
        yield Problem(f"{key}.lora_dtype", "unsupported", message)
    if peft.use_dora and peft.dropout:
        message = f"got true with {key}.dropout={peft.dropout}; expected 0, since DoRA also scales W's output, without dropout"
        yield Problem(f"{key}.use_dora", "contradiction", message)


def _check_only_defaults(section: Any, prefix: str) -> Iterator[Problem]:
    """Yield a problem for each key marked `OnlyDefault`, in a section and its subsections, that has another value."""
    hints = get_type_hints(type(section), include_extras=True)
    for field in fields(section):
        key, value = f"{prefix}.{field.name}", getattr(section, field.name)
        if is_dataclass(value):
            yield from _check_only_defaults(value, key)
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(mark, OnlyDefault) and value != (only := _default(field)):
                yield Problem(key, "unsupported", f"got {_yaml(value)}; expected {_yaml(only)}: {mark.reason}")


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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


def _check_optimizer(optimizer: MegatronOptimizerConfig, precision: str) -> Iterator[Problem]:
    key, bf16 = f"{KEY}.optimizer", precision == "bfloat16"
    if optimizer.bf16 not in (None, bf16):
        message = f"got {_yaml(optimizer.bf16)} with policy.precision={precision}; expected {_yaml(bf16)}. Try without it"
        yield Problem(f"{key}.bf16", "contradiction", message)
    if optimizer.min_lr > optimizer.lr:
        yield Problem(f"{key}.min_lr", "too-large", f"got {optimizer.min_lr}; expected at most {key}.lr, {optimizer.lr}")


def _check_scheduler(scheduler: MegatronSchedulerConfig, optimizer: MegatronOptimizerConfig) -> Iterator[Problem]:
    key, decay = f"{KEY}.scheduler", optimizer.weight_decay
    for name in ("start_weight_decay", "end_weight_decay"):
        if (given := getattr(scheduler, name)) not in (None, decay):
            message = f"got {given}; expected {KEY}.optimizer.weight_decay, {decay}, which does not change. Try without it"
            yield Problem(f"{key}.{name}", "unsupported", message)
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
