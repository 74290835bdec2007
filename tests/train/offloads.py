"""Check `offload` and `reload` of any train backend: nothing stays on the device, and training continues bitwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeline.train.train_backend import Loss, TrainBackend
from pipeline.types import PackedBatch
from tests.train import cases


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
