"""Megatron-Core's process groups and random generators, which all models of a process share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from pipeline.config import PolicyConfig, Problem, RecipeError, expert_tensor_parallel_size

FOREVER_MINUTES = 60 * 24 * 365  # the watchdog bounds waits


def initialize(policy: PolicyConfig, seed: int) -> None:
    """Create the groups from the default group, or check that the existing groups have this layout.

    Raises RecipeError if they have another one: all models of a process share one layout.
    """
    megatron = policy.megatron_cfg
    sizes = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(megatron),
    }
    if not parallel_state.model_parallel_is_initialized():
        options: Any = {"distributed_timeout_minutes": FOREVER_MINUTES, "create_gloo_process_groups": False}
        parallel_state.initialize_model_parallel(**sizes, **options)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return
    for key, size in sizes.items():
        current = getattr(parallel_state, f"get_{key.removesuffix('_size')}_world_size")()
        if size != current:
            message = (
                f"got {size} for {policy.model_name}; expected {current}, as for the other model of this process: all models of"
                " the train component share one layout"
            )
            raise RecipeError(Problem(f"policy.megatron_cfg.{key}", "contradiction", message))


def tensor_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group."""
    return _existing(parallel_state.get_tensor_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    """Return this rank's tensor-parallel group for experts."""
    return _existing(parallel_state.get_expert_tensor_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Return this rank's pipeline-parallel group."""
    return _existing(parallel_state.get_pipeline_model_parallel_group())


def context_group() -> dist.ProcessGroup:
    """Return this rank's context-parallel group."""
    return _existing(parallel_state.get_context_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Return this rank's data-parallel group, without context parallelism."""
    return _existing(parallel_state.get_data_parallel_group())


def _existing(group: Any) -> dist.ProcessGroup:
    assert group is not None  # after `initialize`
    return group
