"""Build vLLM's model of any rank of an engine in one process, with torch's fake process group, to record its layout.

The fake group has any size, and its collectives do nothing; building a model and loading its weights need none. On the meta
device the model takes no memory.

This replaces functions that are private to vLLM; the version is pinned.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from pipeline.generate.vllm import _arguments  # sets environment variables that vLLM reads on import

# isort: split
import torch
import torch.distributed as dist
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel, parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry, utils

from pipeline.config import PolicyConfig
from pipeline.generate.generate_backend import UpdateUnit
from pipeline.generate.vllm_layout import VLLMModel, record
from pipeline.models.hugging_face import model_config


def record_rank(policy: PolicyConfig, shapes: Mapping[str, tuple[int, ...]], rank: int, size: int) -> list[UpdateUnit]:
    """Return the units that rank `rank` of an engine of `size` ranks receives. shapes: of every tensor on disk."""
    arguments = _arguments(policy, model_config(policy), size, seed=0, adapters=None)
    with rank_model(arguments, rank, "meta") as model:
        units = record(model, shapes, getattr(torch, policy.precision), complete=True)
    return [described.unit for described in units.values() if described.unit.regions]


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, in which new tensors are on the CPU."""

    def call(*args: Any, **named: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **named)

    return call


@contextlib.contextmanager
def rank_model(arguments: Mapping[str, Any], rank: int, device: str = "cpu") -> Iterator[VLLMModel]:
    """Yield the model of rank `rank` of an engine with these EngineArgs, with its raw parameters on `device`.

    Takes the process's default group, so no engine may live in the process.
    """
    tensor, stages = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
    ranks, new_group = tensor * stages, dist.new_group
    environment = {name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}.items()}
    replaced = (
        (dist, "new_group", lambda *args, **settings: new_group(*args, **{**settings, "backend": "fake"})),
        # The numbers of a rank's experts have values, on any device.
        (expert_map_manager, "determine_expert_map", _on_cpu(expert_map_manager.determine_expert_map)),
        (registry, "_run_in_subprocess", lambda function: function()),  # it would import vLLM again
        (utils, "_model_to_pp_missing_layer_names", {}),  # cached by id, which another model may have had
        (parallel_state, "_node_count", lambda group: 1),
        (MessageQueue, "create_from_process_group", lambda *args, **settings: None),
        (CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        destroy_model_parallel()
        parallel_state._WORLD = None  # of an earlier engine, whose groups may no longer exist
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=ranks)
        try:
            config = EngineArgs(**{**arguments, "distributed_executor_backend": "external_launcher"}).create_engine_config()
            with set_current_vllm_config(config):
                parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "fake")
                parallel_state.initialize_model_parallel(tensor, stages)
                with torch.device(device):
                    model = initialize_model(config)
                yield model  # pyright: ignore[reportReturnType] - vLLM's models have no common base class
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
