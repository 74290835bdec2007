"""Training backends: Megatron-Core, and FSDP2 on Hugging Face models.

Start with `train_backend`, the protocol that both implement, and with `build`, which makes the backend of a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import PolicyConfig, uses_megatron

if TYPE_CHECKING:
    import torch.distributed as dist

    from pipeline.train.train_backend import ModelRole, TrainBackend


def build(policy: PolicyConfig, group: dist.ProcessGroup, seed: int, role: ModelRole) -> TrainBackend:
    """Build this rank's part of a model. Collective over `group`.

    group: the train component, which must be the default group. A process may hold several models, all with one layout.
    seed: for random weights, if the recipe asks for these, and for a value head that the checkpoint does not have.
    Raises RecipeError if the model or the layout is not supported.
    """
    if policy.deterministic:
        from pipeline.train import kernels  # needs torch, which submission may lack

        kernels.make_deterministic()
    if uses_megatron(policy):
        from pipeline.train.megatron.megatron_backend import MegatronBackend  # slow; only runs that use it

        return MegatronBackend(policy, group, seed, role)
    from pipeline.train.fsdp import FSDPBackend  # slow; only runs that use it

    return FSDPBackend(policy, group, seed, role)
