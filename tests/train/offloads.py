"""Check `offload` and `reload` of any train backend: nothing stays on the device, and training continues bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.train.fsdp import FSDPBackend
from pipeline.train.shards import local
from pipeline.train.train_backend import Loss, TrainBackend
from pipeline.types import PackedBatch
from tests.train import cases, ranks
from tests.train.ranks import Layout


def check(
    new: Callable[[], TrainBackend],
    batches: list[PackedBatch],
    states: Callable[[TrainBackend], list[torch.Tensor]],
    loss: Loss = cases.loss,
) -> None:
    """Check a backend.

    new: returns a backend, the same each time. states(backend): the optimizer's tensors besides the weights, of which none
    may be there while only weights are kept.
    """
    stayed, left = new(), new()
    for trained in (stayed, left):
        cases.learn(trained, batches, loss)
    names, _ = (sorted({region.tensor for region in trained.layout()}) for trained in (left, stayed))
    for keep_weights in (False, True, True):
        read = {name: left.local_tensor(name).clone() for name in names}
        held = states(left)
        assert held and all(tensor.untyped_storage().nbytes() for tensor in held)
        if keep_weights:
            left.offload(keep_weights=True)
            assert all(torch.equal(left.local_tensor(name), tensor) for name, tensor in read.items())
            assert not any(tensor.untyped_storage().nbytes() for tensor in held)
        left.offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in [*held, *map(left.local_tensor, names)])
        left.offload()  # nothing is left to move
        left.reload()
        assert all(torch.equal(left.local_tensor(name), tensor) for name, tensor in read.items())
        assert cases.learn(left, batches, loss) == cases.learn(stayed, batches, loss)
        forward = [trained.forward(batches)[0].logprobs for trained in (left, stayed)]
        assert torch.equal(*forward)
    for name in names:
        assert torch.equal(left.local_tensor(name), stayed.local_tensor(name)), name


def check_fsdp(layout: Layout, folder: Path, family: str, dtensor: dict[str, Any] | None = None, **changes) -> None:
    """Check FSDP2. dtensor: changes of `policy.dtensor_cfg`. changes: of the policy."""

    def new() -> FSDPBackend:
        policy = cases.policy(folder / family, scheduler=ranks.SCHEDULER, max_grad_norm=0.5, **changes)
        return ranks.backend(policy, layout, **(dtensor or {}))

    def states(trained: FSDPBackend) -> list[torch.Tensor]:
        return [local(value) for state in trained._optimizer.state.values() for value in state.values() if value.dim()]

    check(new, ranks.batches(new(), layout), states)
