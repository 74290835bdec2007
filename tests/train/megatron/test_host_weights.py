"""Check that the Megatron backend offloads and reloads its memory: buffers, views into them, and the optimizer."""

from pathlib import Path

import pytest
import torch

from pipeline.train.base import ModelRole
from pipeline.train.megatron.backend import MegatronBackend
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

    offloads.check(new, layouts.batches(new(), layout), states)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.usefixtures("realm")
def test_one_rank(precision, models):
    check(ONE, models, precision)


@pytest.mark.long
def test_two_ranks(models):
    layouts.run(check, DP2, models)
    layouts.run(check, EP2, models)


@pytest.mark.usefixtures("realm")
@pytest.mark.parametrize("on_the_host", [False, True])
def test_a_frozen_model(on_the_host, models):
    """Check also a model whose weights are on the host except while it computes."""
    frozen = layouts.backend(cases.policy(models / "qwen3"), ONE, ModelRole(trained=False, offload=on_the_host))
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
