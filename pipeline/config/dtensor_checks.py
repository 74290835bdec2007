"""Checks FSDP2's keys, `policy.dtensor_cfg`, against each other. `pipeline/config/layout.py` checks how the ranks divide."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import hardware
from pipeline.config.layout import DTENSOR
from pipeline.config.models import serves_rewards
from pipeline.config.schema import Recipe


def check_dtensor(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each pair of keys that cannot be had together."""
    yield from _check_kernels(recipe)
    dtensor = recipe.policy.dtensor_cfg
    if dtensor.compile and dtensor.tensor_parallel_size > 1:
        yield (
            f"{DTENSOR}.compile: got true with {DTENSOR}.tensor_parallel_size={dtensor.tensor_parallel_size}; expected 1, since"
            f" torch cannot compile these layers cut. Try {DTENSOR}.compile=false"
        )
    selective = dtensor.recompute_granularity == "selective"
    if selective and not dtensor.activation_checkpointing:
        yield (
            f"{DTENSOR}.recompute_granularity: says nothing while {DTENSOR}.activation_checkpointing is false; set that to true"
        )
    if not dtensor.reference_cpu_offload:
        for key, on in (("lora_cfg.enabled", dtensor.lora_cfg.enabled), ("cpu_offload", dtensor.cpu_offload)):
            if on:
                yield f"{DTENSOR}.reference_cpu_offload: says nothing while {DTENSOR}.{key} is true; leave it out"
    if selective and dtensor.compile:
        yield (
            f"{DTENSOR}.recompute_granularity: got selective with {DTENSOR}.compile=true; expected full, since operators inside"
            f" compiled layers cannot be chosen. Try {DTENSOR}.compile=false"
        )
    if dtensor.use_liger_kernel and dtensor.compile:
        yield (
            f"{DTENSOR}.use_liger_kernel: got true with {DTENSOR}.compile=true; expected one of the two, which fuse the same"
            f" operations. Try {DTENSOR}.compile=false"
        )


def _check_kernels(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each component without GPUs on which the kernels that are asked for run."""
    dtensor = recipe.policy.dtensor_cfg
    third = dtensor.flash_attention == 3
    for name in ("train", "reward") if serves_rewards(recipe) else ("train",):
        component = getattr(recipe.cluster, name)
        none = f"with cluster.{name}.gpus_per_node=0; expected GPUs. Try"
        if dtensor.use_liger_kernel and not component.gpus_per_node:
            yield f"{DTENSOR}.use_liger_kernel: got true {none} {DTENSOR}.use_liger_kernel=false"
        if third and not component.gpus_per_node:
            yield f"{DTENSOR}.flash_attention: got 3 {none} {DTENSOR}.flash_attention=2"
        capability = hardware.described(component.gpu, "compute_capability")
        if third and component.gpus_per_node and int(capability) != hardware.HOPPER:
            yield (
                f"{DTENSOR}.flash_attention: got 3 with cluster.{name}.gpu={component.gpu}, of compute capability {capability};"
                f" expected Hopper, {hardware.HOPPER}.0. Try {DTENSOR}.flash_attention=2"
            )
