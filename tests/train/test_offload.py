"""The FSDP2 backend gives its memory back and takes it again: plain, sharded in two precisions, with adapters, on two ranks."""

from pathlib import Path

import pytest
import torch

from pipeline.config import LoRAConfig
from pipeline.train.base import Use
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.shards import local
from tests.train import cases, offloads, ranks
from tests.train.ranks import Layout

KINDS = {"plain": {}, "sharded": {"precision": "bfloat16"}, "adapters": {}}


def states(trained: FSDPBackend) -> list[torch.Tensor]:
    return [local(value) for state in trained._optimizer.state.values() for value in state.values() if value.dim()]


def check(layout: Layout, folder: Path, kind: str = "plain") -> None:
    dtensor = {"lora_cfg": LoRAConfig(True, dim=3)} if kind == "adapters" else {}

    def new() -> FSDPBackend:
        policy = cases.policy(folder / "qwen3_tied", scheduler=ranks.SCHEDULER, max_grad_norm=0.5, **KINDS[kind])
        return ranks.backend(policy, layout, **dtensor)

    mine = ranks.shares(layout)[new().data_rank]
    offloads.check(new, [cases.pack(chosen) for chosen in mine], states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("realm")
def test_one_rank(kind, models):
    check(Layout(1, 1), models, kind)


@pytest.mark.usefixtures("realm")
def test_what_a_checkpoint_brought_moves_too(models, tmp_path):
    first, again = (ranks.backend(cases.policy(models / "qwen3_tied")) for _ in range(2))
    batches = [cases.pack([0, 1, 2])]
    first.step(batches, cases.loss)
    first.shards().write(tmp_path, 0)
    again.load(tmp_path)
    again.offload()
    again.reload()
    assert again.step(batches, cases.loss).metrics == first.step(batches, cases.loss).metrics
    assert all(torch.equal(first.local(name), again.local(name)) for name in {region.tensor for region in first.layout()})


@pytest.mark.long
def test_two_ranks(models):
    ranks.run(check, Layout(2, 1), models)
    ranks.run(check, Layout(1, 2), models)


@pytest.mark.usefixtures("realm")
def test_a_frozen_model(models):
    """A teacher or a reward model; its weights are kept, and that is all it has."""
    frozen = ranks.backend(cases.policy(models / "qwen3"), use=Use(trained=False))
    batches = [cases.pack([0, 1, 2])]
    before = frozen.forward(batches)[0].logprobs
    frozen.offload(keep_weights=True)
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)
    frozen.offload()
    assert not any(parameter.untyped_storage().nbytes() for parameter in frozen._model.parameters())
    frozen.reload()
    assert torch.equal(frozen.forward(batches)[0].logprobs, before)
