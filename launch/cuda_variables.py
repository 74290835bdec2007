"""Variables that CUDA reads when it starts in a rank, so that they must be set before Python does."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import Recipe, hardware, uses_megatron

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def of_train_ranks(recipe: Recipe) -> dict[str, str]:
    """Return CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron-Core where tensor or context parallelism cuts what a layer computes.

    With one connection, kernels start in the order of their calls. Megatron-Core relies on that to start a collective before
    the product that hides it (megatron/core/tensor_parallel/layers.py, "Here we rely on CUDA_DEVICE_MAX_CONNECTIONS=1").
    Megatron-LM requires it for the same layouts and devices (megatron/training/arguments.py): Blackwell no longer needs it,
    and FSDP overlaps less with it. What the recipe sets itself goes before this.
    """
    megatron, component = recipe.policy.megatron_cfg, recipe.cluster.train
    cuts = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if not (uses_megatron(recipe.policy) and cuts and component.gpus_per_node):
        return {}
    if hardware.described(component.gpu, "compute_capability") >= hardware.BLACKWELL:
        return {}
    return {NAME: "1"}


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield which GPU the train ranks get a variable for, since cluster.train.gpu may be no more than its default."""
    own = {**(recipe.policy.megatron_cfg.env_vars or {}), **recipe.cluster.train.env_vars}
    if NAME not in own and of_train_ranks(recipe):
        yield f"{NAME}=1 on train ranks, for cluster.train.gpu={recipe.cluster.train.gpu}; Blackwell GPUs do without it"
