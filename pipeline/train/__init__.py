"""Training backends. Which one a recipe uses was decided when it was submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import PolicyConfig, uses_megatron

if TYPE_CHECKING:
    import torch.distributed as dist

    from pipeline.train.base import ModelRole, TrainBackend


def build(policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole) -> TrainBackend:
    """This rank's part of a model. Collective over `group`, the train ranks, the default group. A process
    may hold several models, all at one layout.

    seed: of random weights, if the recipe wants those, and of a value head that the checkpoint does not have.
    Raises ValueError, naming the key of the recipe, if the model or the layout is not supported.
    """
    if uses_megatron(policy):
        from pipeline.train.megatron.backend import MegatronBackend

        return MegatronBackend(policy, group, seed, role)
    from pipeline.train.fsdp import FSDPBackend

    return FSDPBackend(policy, group, seed, role)
