"""Choose the variables that CUDA and Triton read early, which must be set before a rank's Python starts."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import ComponentConfig, PolicyConfig, Recipe, hardware, uses_megatron

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
EXACT_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}


def for_train_ranks(recipe: Recipe) -> dict[str, str]:
    """Return the variables of train ranks. The recipe's own variables override them."""
    return {CONNECTIONS: "1"} if recipe.cluster.train.gpus_per_node and _relies_on_the_order_of_kernels(recipe) else {}


def for_engines(model: PolicyConfig, component: ComponentConfig) -> dict[str, str]:
    """Return the variables of the ranks of engines that serve a model. The recipe's own variables override them.

    In float32, vLLM computes attention and experts with Triton kernels that set no precision of their matrix products. Triton's
    default is TF32, which has 10 bits: log-probs would differ by 1e-3 from those of the train ranks, which compute in float32.
    vLLM multiplies other matrices in float32 (VLLM_FLOAT32_MATMUL_PRECISION). The value of this variable is part of the cache
    key of compiled kernels (triton, include/triton/Tools/Sys/GetEnv.hpp).
    """
    exact = model.precision == "float32" and model.generation.backend == "vllm"
    return EXACT_FLOAT32 if exact and component.gpus_per_node else {}


def _relies_on_the_order_of_kernels(recipe: Recipe) -> bool:
    """Return whether Megatron-Core trains with tensor or context parallelism on GPUs older than Blackwell.

    With CUDA_DEVICE_MAX_CONNECTIONS=1, kernels start in the order of their calls. Megatron-Core relies on this order to start a
    collective before the matrix product that overlaps it (megatron/core/tensor_parallel/layers.py, "Here we rely on
    CUDA_DEVICE_MAX_CONNECTIONS=1"). Megatron-LM requires this value for the same layouts and devices
    (megatron/training/arguments.py). Blackwell does not need it, and FSDP overlaps less with it.
    """
    megatron = recipe.policy.megatron_cfg
    cuts = megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1
    older = hardware.gpu_value(recipe.cluster.train.gpu, "compute_capability") < hardware.BLACKWELL
    return uses_megatron(recipe.policy) and cuts and older


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note that names the GPU for which CUDA_DEVICE_MAX_CONNECTIONS is set, as cluster.train.gpu may be the default."""
    if CONNECTIONS not in recipe.cluster.train.env_vars and CONNECTIONS in for_train_ranks(recipe):
        yield f"{CONNECTIONS}=1 on train ranks, for cluster.train.gpu={recipe.cluster.train.gpu}; Blackwell GPUs do not need it"
