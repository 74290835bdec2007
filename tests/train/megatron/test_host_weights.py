"""Check that the Megatron backend offloads and reloads its memory: buffers, views into them, and the optimizer."""

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.train import offload
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.offload import host_memory
from pipeline.train.train_backend import ModelRole
from tests.train import cases, offloads, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import DP2, EP2, ONE, Layout


def states(trained: MegatronBackend) -> list[torch.Tensor]:
    buffers = [*trained._model.buffers, *trained._model.expert_parallel_buffers]
    return [
        *(buffer.grad_data for buffer in buffers),
        *(t for part in trained._optimizer.ranges() for t in part.state.values()),
    ]


def check(layout: Layout, folder: Path, precision: str = "float32") -> None:
    def new() -> MegatronBackend:
        policy = cases.policy(folder / "qwen3_moe", scheduler=ranks.SCHEDULER, max_grad_norm=0.5, precision=precision)
        return layouts.backend(policy, layout)

    offloads.check(new, ranks.batches(new(), layout), states)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.usefixtures("realm")
def test_one_rank(precision, models):
    check(ONE, models, precision)


@pytest.mark.long
def test_two_ranks(models):
    ranks.run(check, DP2, models)
    ranks.run(check, EP2, models)


@pytest.mark.usefixtures("realm")
def test_a_frozen_model(models):
    frozen = layouts.backend(cases.policy(models / "qwen3"), ONE, ModelRole(trained=False))
    batches = [cases.pack([0, 1, 2])]
    before = frozen.forward(batches)[0].logprobs
    frozen.offload()
    assert not any(local.tensor.untyped_storage().nbytes() for local in frozen._local.values())
    frozen.reload()
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)
    next(iter(frozen._local.values())).tensor.zero_()
    frozen.offload()  # has a copy of them, so it makes none
    frozen.reload()
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)


@pytest.mark.usefixtures("realm")
def test_a_frozen_model_in_host_memory(models, monkeypatch):
    """Its weights are in one block, and nothing refers to the memory that they had."""
    policy, sizes, left = cases.policy(models / "qwen3"), [], []
    expected = ranks.weights(layouts.backend(policy, ONE, ModelRole(trained=False)))

    class Recorded(offload.HostWeights):
        def __init__(self, tensors, device):
            left.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
            super().__init__(tensors, device)

    def recorded(size: int, page_locked: bool) -> torch.Tensor:
        sizes.append(size)
        return host_memory(size, page_locked)

    monkeypatch.setattr("pipeline.train.megatron.megatron_backend.HostWeights", Recorded)
    monkeypatch.setattr(offload, "host_memory", recorded)
    frozen = layouts.backend(policy, ONE, ModelRole(trained=False, offload=True))
    tensors = [local.tensor for local in frozen._local.values()]
    assert len(left) == len(tensors) and all(storage.expired() for storage in left)
    assert len(sizes) == 1 and sum(tensor.nbytes for tensor in tensors) <= sizes[0]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for _ in range(2):
        found = ranks.weights(frozen)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        frozen.offload()  # it is in host memory already
        frozen.reload()


class Copies(TorchDispatchMode):
    """Records the operations that return more than an address of memory that exists."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        after = {one.untyped_storage().data_ptr() for one in tree_leaves(result) if torch.is_tensor(one)}
        if function._schema.is_mutable or after - before:
            self.seen.append(str(function))
        return result


@pytest.mark.usefixtures("realm")
@pytest.mark.parametrize("family", ["qwen3_tied", "deepseek_v3"])
def test_a_reference_takes_the_place_of_the_policy_without_copies_of_it(family, models):
    trained = layouts.backend(cases.policy(models / family, precision="bfloat16"), ONE, ModelRole(reference=True))
    batches = [cases.pack([0, 1, 2])]
    initial = [local.tensor.clone() for local in trained._local.values()]
    trained.step(batches, cases.loss)
    tensors = [local.tensor for local in trained._local.values()]
    before, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    assert not all(torch.equal(*pair) for pair in zip(before, initial, strict=True))
    for _ in range(2):
        with Copies() as copies, trained._weights_of("reference"):
            found, during = [tensor.detach() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        assert copies.seen == [] and not set(during) & set(places)
        assert all(torch.equal(*pair) for pair in zip(found, initial, strict=True))
        assert [tensor.data_ptr() for tensor in tensors] == places
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    with pytest.raises(KeyError), trained._weights_of("reference"):
        raise KeyError  # a pass that fails
    assert [tensor.data_ptr() for tensor in tensors] == places
    trained.step(batches, cases.loss)  # writes into Megatron-Core's buffer of parameters, of which these are still parts
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert not all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


@pytest.mark.usefixtures("realm")
def test_a_reference_stays_through_turns(models):
    trained = layouts.backend(cases.policy(models / "qwen3_moe"), ONE, ModelRole(reference=True))
    batches = [cases.pack([0, 1, 2])]
    expected = trained.forward(batches, "reference")[0].logprobs
    trained.step(batches, cases.loss)
    policy = trained.forward(batches)[0].logprobs
    for _ in range(2):
        trained.offload(keep_weights=True)
        trained.offload()
        trained.reload()
        assert torch.equal(trained.forward(batches, "reference")[0].logprobs, expected)
        assert torch.equal(trained.forward(batches)[0].logprobs, policy)
    assert not torch.equal(policy, expected)
