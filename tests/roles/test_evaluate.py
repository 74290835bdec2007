"""Validation on fewer items than data-parallel ranks: ranks without items do not change the result."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from pipeline import algorithms, config
from pipeline.data.batches import split_batch
from pipeline.roles import TrainRole
from pipeline.types import DataParallelRank, Sample
from tests.train.conftest import realm  # noqa: F401

RANKS = 4
OVERRIDES = ["needs=[]", "policy.model_name=recipes/tiny", "policy.random_init=true"]


@pytest.fixture
def megatron_ended(realm):  # noqa: F811
    yield
    from pipeline.train.megatron.groups import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def role(name: str, backend: str, path) -> TrainRole:
    recipe = config.load(name, [f"run_dir={path}", *OVERRIDES, f"policy.{backend}_cfg.enabled=true"])
    world = SimpleNamespace(own=dist.group.WORLD, rank=0, info=SimpleNamespace(run_dir=path), phase=contextlib.nullcontext)
    made = TrainRole(recipe, 0, world, algorithms.build(recipe), None)
    made.setup()
    return made


def sample(draw: np.random.Generator, length: int) -> Sample:
    zeros = np.zeros(length, np.float32)
    return Sample(draw.integers(3, 30, length).astype(np.int32), np.arange(length) >= 3, zeros, zeros)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.parametrize("name", ["tiny_sft", "tiny_dpo", "tiny_rm"])
def test_ranks_without_an_item_have_no_share(name, backend, megatron_ended, tmp_path):
    made, draw = role(name, backend, tmp_path), np.random.default_rng(0)
    together = made._algorithm.sequences_per_item
    samples = [sample(draw, length) for length in (9, 6, 12, 5)[: 2 * together]]

    def shares(ranks: int) -> list[dict[str, float]]:
        """Return the shares of two items, by data rank."""
        places = [DataParallelRank(rank, ranks) for rank in range(ranks)]
        return [made.evaluate(update) for (update,) in split_batch(samples, made._recipe.policy, places, 2, together)]

    (whole,), parts = shares(1), shares(RANKS)
    assert whole["loss"] > 0
    for name, value in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert [part for part in parts if any(part.values())] == parts[:2]
    assert parts[2:] == [dict.fromkeys(whole, 0.0)] * (RANKS - 2)
