"""Check FSDP2's keys, `policy.dtensor_cfg`. `pipeline/config/parallelism.py` checks how the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import hardware
from pipeline.config.other_models import serves_rewards
from pipeline.config.parallelism import DTENSOR, named_backend
from pipeline.config.schema import Recipe
from pipeline.recipe.problems import Problem

LORA = f"{DTENSOR}.lora_cfg"


def check_dtensor(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each unsupported combination of keys."""
    yield from _check_kernels(recipe)
    dtensor = recipe.policy.dtensor_cfg
    selective = dtensor.recompute_granularity == "selective"
    if dtensor.compile:
        off = f"Try {DTENSOR}.compile=false"
        for name in ("tensor_parallel_size", "expert_parallel_size"):
            if (size := getattr(dtensor, name)) > 1:
                message = f"got true with {DTENSOR}.{name}={size}; expected 1, since torch cannot compile sharded layers"
                yield Problem(f"{DTENSOR}.compile", "contradiction", f"{message}. {off}")
        if selective:
            message = f"got selective with {DTENSOR}.compile=true; expected full, since compiled operators cannot be selected"
            yield Problem(f"{DTENSOR}.recompute_granularity", "contradiction", f"{message}. {off}")
        if dtensor.use_liger_kernel:
            message = f"got true with {DTENSOR}.compile=true; expected only one of the two, since both fuse the same operations"
            yield Problem(f"{DTENSOR}.use_liger_kernel", "contradiction", f"{message}. {off}")
    if selective and dtensor.activation_checkpointing is False:
        message = f"got selective with activation_checkpointing=false. Try {DTENSOR}.activation_checkpointing=true"
        yield Problem(f"{DTENSOR}.recompute_granularity", "has-no-effect", message)
    if not dtensor.reference_cpu_offload:
        for key, on in (("lora_cfg.enabled", dtensor.lora_cfg.enabled), ("cpu_offload", dtensor.cpu_offload)):
            if on:
                message = f"got false with {DTENSOR}.{key}=true, which overrides it. Try without it"
                yield Problem(f"{DTENSOR}.reference_cpu_offload", "has-no-effect", message)


def _check_kernels(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each component whose GPUs, or lack of GPUs, cannot run the requested kernels."""
    dtensor = recipe.policy.dtensor_cfg
    third = dtensor.flash_attention == 3
    liger, flash = f"{DTENSOR}.use_liger_kernel", f"{DTENSOR}.flash_attention"
    for name in ("train", "reward") if serves_rewards(recipe) else ("train",):
        component = getattr(recipe.cluster, name)
        none = f"with cluster.{name}.gpus_per_node=0; expected GPUs. Try"
        if dtensor.use_liger_kernel and not component.gpus_per_node:
            yield Problem(liger, "needs-gpu", f"got true {none} {liger}=false")
        if third and not component.gpus_per_node:
            yield Problem(flash, "needs-gpu", f"got 3 {none} {flash}=2")
        capability = hardware.gpu_value(component.gpu, "compute_capability")
        if third and component.gpus_per_node and int(capability) != hardware.HOPPER:
            message = (
                f"got 3 with cluster.{name}.gpu={component.gpu}, of compute capability {capability}; expected a Hopper"
                f" GPU, of compute capability {hardware.HOPPER}.0. Try {flash}=2"
            )
            yield Problem(flash, "unsupported", message)


def check_lora(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of adapters, for either backend."""
    dtensor, key = recipe.policy.dtensor_cfg, LORA
    lora = dtensor.lora_cfg
    if not lora.enabled:
        return
    if named_backend(recipe.policy) == "megatron":
        message = (
            f"got true with Megatron-Core; expected false. Try policy.megatron_cfg.peft.enabled=true, or {DTENSOR}.enabled=true"
        )
        yield Problem(f"{key}.enabled", "unsupported", message)
    if dtensor.compile and lora.dropout:
        message = f"got {lora.dropout} with {DTENSOR}.compile=true; expected 0, since compiled layers draw no random numbers"
        yield Problem(f"{key}.dropout", "contradiction", f"{message}. Try {DTENSOR}.compile=false")
    if lora.match_all_linear and lora.target_modules:
        message = f"got names with {key}.match_all_linear=true, which takes all linear layers; expected none"
        message = f"{message}. Try {key}.match_all_linear=false"
        yield Problem(f"{key}.target_modules", "contradiction", message)
    if not lora.match_all_linear and not lora.target_modules:
        message = (
            f"got none with {key}.match_all_linear=false; expected names of layers to adapt. Try {key}.match_all_linear=true"
        )
        yield Problem(f"{key}.target_modules", "missing-value", message)
