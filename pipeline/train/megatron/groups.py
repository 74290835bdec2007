"""Megatron-Core's process groups and random generators. A process has them once, for all models that it holds."""

from __future__ import annotations

from megatron.core import parallel_state, tensor_parallel

from pipeline.config import PolicyConfig, expert_tensor_parallel_size

FOREVER_MINUTES = 60 * 24 * 365  # the watchdog bounds waits


def initialize(policy: PolicyConfig, seed: int) -> None:
    """Make them from the default group, or see that they are of this layout: a process's models share one.

    Raises ValueError, naming the key of the recipe, if they are of another.
    """
    megatron = policy.megatron_cfg
    if parallel_state.model_parallel_is_initialized():
        _check(policy)
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(megatron),
        distributed_timeout_minutes=FOREVER_MINUTES,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _check(policy: PolicyConfig) -> None:
    megatron = policy.megatron_cfg
    wanted = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(megatron),
    }
    for key, size in wanted.items():
        found = getattr(parallel_state, f"get_{key.removesuffix('_size')}_world_size")()
        if size != found:
            raise ValueError(
                f"policy.megatron_cfg.{key}: {size} for {policy.model_name}, but this process has a model with {found};"
                " all models of the train component have one layout"
            )
