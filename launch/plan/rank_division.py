"""Compute how a component's ranks divide a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config import ComponentConfig, PolicyConfig, engine_ranks, expert_tensor_parallel_size, ranks, uses_megatron
from pipeline.models.shape import ModelShape

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The sizes of the parallel groups of a component."""

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False  # whether tensor-parallel ranks divide the tokens outside of attention and MLP
    replicas: int = 1  # FSDP2: copies of the weights, each of which the other ranks shard

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks."""
        return max(1, self.ranks // (self.tensor * self.pipeline * self.context))

    @property
    def shard(self) -> int:
        """Return the number of ranks over which FSDP2 shards a tensor-parallel rank's weights."""
        return max(1, self.ranks // (self.tensor * self.replicas))

    @property
    def expert_shard(self) -> int:
        """Return the number of ranks over which FSDP2 shards a rank's routed experts, which tensor parallelism does not cut."""
        return max(1, self.ranks // (self.expert * self.replicas))

    def gathered_experts(self, shape: ModelShape) -> float:
        """Return the number of parameters of routed experts that an FSDP2 rank gathers, with padding.

        `fully_shard` cuts the stack of experts along the dimension that counts them. If the number of experts is not a multiple
        of the number of ranks, each rank's shard is padded to the largest one.
        """
        count = shape.experts / self.expert
        padded = math.ceil(count / self.expert_shard) * self.expert_shard / count if count else 1.0
        return shape.routed / self.expert * padded

    @property
    def expert_data(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return max(1, self.ranks // (self.expert * self.expert_tensor * self.pipeline))

    def parameters_of_rank(self, shape: ModelShape) -> tuple[float, float]:
        """Return the mean number of parameters of a rank: (outside of routed experts, in routed experts)."""
        dense = (shape.parameters - shape.routed) / (self.tensor * self.pipeline)
        return dense, shape.routed / (self.expert * self.expert_tensor * self.pipeline)


def train_parallelism(policy: PolicyConfig, component: ComponentConfig) -> Parallelism:
    """Return the sizes of the train backend's parallel groups, for a model with the settings `policy`."""
    if not uses_megatron(policy):
        dtensor = policy.dtensor_cfg
        tensor, expert = dtensor.tensor_parallel_size, dtensor.expert_parallel_size
        return Parallelism(
            ranks(component),
            tensor,
            context=dtensor.context_parallel_size,
            expert=expert,
            expert_tensor=tensor if expert == 1 else 1,  # tokens are split over tensor-parallel ranks before their experts
            sequence=dtensor.sequence_parallel,
            replicas=dtensor.data_parallel_replicate_size,
        )
    megatron = policy.megatron_cfg
    return Parallelism(
        ranks(component),
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
        megatron.expert_model_parallel_size,
        expert_tensor_parallel_size(megatron),
        megatron.sequence_parallel,
    )


def engines(policy: PolicyConfig, component: ComponentConfig) -> int:
    """Return the number of engines on the generate ranks. The Transformers backend has one on each rank."""
    size = engine_ranks(policy.generation.vllm_cfg) if policy.generation.backend == "vllm" else 1
    return max(1, ranks(component) // size)


def parallel_sizes(section: object) -> str:
    """Return a text with the parallel sizes above 1 of a backend's section, named by their keys without `_size`."""
    sizes = {key: value for key, value in vars(section).items() if key.endswith("_parallel_size") and (value or 1) > 1}
    return ", ".join(f"{key.removesuffix('_size')} {value}" for key, value in sizes.items()) or "no model parallelism"
