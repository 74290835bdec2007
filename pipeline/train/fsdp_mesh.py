"""The layout of the FSDP2 backend's ranks: replicas x data x context x tensor parallelism, and experts.

Ranks are numbered with tensor parallelism innermost. `fully_shard` cuts dense parameters over data and context ranks together,
within each replica (HSDP). Ranks of one batch are the context x tensor ranks with the same `data_rank`.

Experts have a mesh of their own over the same ranks: replicas x shard x expert. Each expert-parallel rank holds whole experts.
Tokens are split over tensor-parallel ranks before they go to their experts, so no tensor-parallel cut of experts is needed;
`fully_shard` cuts the experts of a rank over the `shard` dimension.

    8 ranks, replicas 1, data 2, context 2, tensor 2:   dense mesh  (replicate 1, shard 4, tensor 2)
    the same, experts 4:                                expert mesh (replicate 1, shard 2, expert 4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.config import DTensorConfig, Problem, RecipeError

KEY = "policy.dtensor_cfg"


@dataclass(frozen=True)
class Layout:
    """Sizes of the layout, and this rank's place in it."""

    rank: int
    replicas: int  # data-parallel ranks with the same part of the weights
    data: int  # data-parallel ranks of a replica
    context: int
    tensor: int
    expert: int
    sequence: bool  # activations between tensor-parallel regions are cut over the tensor-parallel ranks

    @classmethod
    def of(cls, config: DTensorConfig, ranks: int, rank: int) -> Layout:
        """Return the layout of `ranks` ranks, for rank `rank`. Raises RecipeError if the recipe's sizes do not divide them."""
        sizes = {
            "data_parallel_replicate_size": config.data_parallel_replicate_size,
            "context_parallel_size": config.context_parallel_size,
            "tensor_parallel_size": config.tensor_parallel_size,
        }
        if ranks % math.prod(sizes.values()):
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            message = f"got {product}; expected a divisor of the number of train ranks, {ranks}"
            name = next(name for name in reversed(sizes) if sizes[name] > 1)
            raise RecipeError(Problem(f"{KEY}.{name}", "not-divisible", message))
        replicas, context, tensor = sizes.values()
        expert, of_replica = config.expert_parallel_size, ranks // replicas
        if of_replica % expert:
            message = f"got {expert}; expected a divisor of the {of_replica} train ranks of a replica"
            raise RecipeError(Problem(f"{KEY}.expert_parallel_size", "not-divisible", message))
        data = of_replica // (context * tensor)
        return cls(rank, replicas, data, context, tensor, expert, config.sequence_parallel)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that decide which ranks compute the same tokens and therefore draw the same random numbers."""
        return {"replicas": self.replicas, "data": self.data, "context": self.context, "tensor": self.tensor}

    @property
    def data_size(self) -> int:
        """The number of data-parallel ranks, over all replicas."""
        return self.replicas * self.data

    @property
    def data_rank(self) -> int:
        """This rank's number among the data-parallel ranks."""
        return self.rank // (self.context * self.tensor)

    @property
    def context_rank(self) -> int:
        """This rank's number among the context-parallel ranks of its batch."""
        return self.rank // self.tensor % self.context

    @property
    def tokens_multiple(self) -> int:
        """The number of which each context-parallel rank's number of tokens must be a multiple."""
        return self.tensor if self.sequence else 1

    @property
    def leads_batch(self) -> bool:
        """Return whether this rank is the first of the ranks that compute its batch."""
        return self.rank % (self.context * self.tensor) == 0


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a layout. Creating them is collective over the train component."""

    dense: DeviceMesh  # (replicate, shard, tensor)
    experts: DeviceMesh  # (replicate, expert_shard, expert)
    context: dist.ProcessGroup | None  # context-parallel ranks; None: one

    @classmethod
    def of(cls, layout: Layout, device_type: str) -> Meshes:
        """Create the meshes, on the default group."""
        shard = layout.data * layout.context
        shape = (layout.replicas, shard, layout.tensor)
        dense = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        shape = (layout.replicas, shard * layout.tensor // layout.expert, layout.expert)
        experts = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "expert_shard", "expert"))
        context = None
        if layout.context > 1:
            shape = (layout.data_size, layout.context, layout.tensor)
            names = ("batch", "context", "tensor")
            context = init_device_mesh(device_type, shape, mesh_dim_names=names).get_group("context")
        return cls(dense, experts, context)

    @property
    def data(self) -> DeviceMesh:
        """The mesh over which `fully_shard` cuts dense parameters: (shard), or (replicate, shard) with replicas."""
        return self.dense["replicate", "shard"] if self.dense["replicate"].size() > 1 else self.dense["shard"]

    @property
    def expert_data(self) -> DeviceMesh:
        """The mesh over which `fully_shard` cuts experts: (expert_shard), or (replicate, expert_shard) with replicas."""
        replicated = self.experts["replicate"].size() > 1
        return self.experts["replicate", "expert_shard"] if replicated else self.experts["expert_shard"]

    @property
    def expert(self) -> DeviceMesh:
        """The 1-d mesh of this rank's expert-parallel peers."""
        return self.experts["expert"]

    @property
    def tensor(self) -> DeviceMesh:
        """The 1-d mesh of this rank's tensor-parallel peers."""
        return self.dense["tensor"]
