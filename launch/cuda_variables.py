"""Set the variables that CUDA reads at initialization, so ranks need them before Python starts."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import Recipe, hardware, uses_megatron

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def for_train_ranks(recipe: Recipe) -> dict[str, str]:
    """Return CUDA_DEVICE_MAX_CONNECTIONS=1 for Megatron-Core with tensor or context parallelism; else {}.

    With one connection, kernels start in the order of their calls. Megatron-Core relies on that to start a collective before
    the matrix product that hides it (megatron/core/tensor_parallel/layers.py, "Here we rely on
    CUDA_DEVICE_MAX_CONNECTIONS=1"). Megatron-LM requires it for the same layouts and devices (megatron/training/arguments.py):
    Blackwell does not need it, and FSDP overlaps less with it. The recipe's own variables override this.
    """
    megatron, component = recipe.policy.megatron_cfg, recipe.cluster.train
    cuts = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    if not (uses_megatron(recipe.policy) and cuts and component.gpus_per_node):
        return {}
    if hardware.described(component.gpu, "compute_capability") >= hardware.BLACKWELL:
        return {}
    return {NAME: "1"}


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note that names the GPU for which the variable is set, since cluster.train.gpu may be only the default."""
    own = {**(recipe.policy.megatron_cfg.env_vars or {}), **recipe.cluster.train.env_vars}
    if NAME not in own and for_train_ranks(recipe):
        yield f"{NAME}=1 on train ranks, for cluster.train.gpu={recipe.cluster.train.gpu}; Blackwell GPUs do not need it"
