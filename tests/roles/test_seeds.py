"""The generators of torch, Python and numpy on train ranks are seeded by the recipe's seed and the data-parallel rank."""

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline import algorithms, config
from pipeline.roles import TrainRole
from pipeline.train.checkpoint_state import seed_generators
from tests.train.conftest import realm  # noqa: F401


@pytest.fixture(autouse=True)
def own_state():
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw() -> list[float]:
    return [*torch.rand(4).tolist(), *(random.random() for _ in range(4)), *np.random.rand(4).tolist()]


def drawn(seed: int, data_rank: int) -> list[float]:
    seed_generators(seed, data_rank)
    return draw()


def test_draws_differ_by_data_rank_and_seed_and_are_reproducible():
    places = [(seed, rank) for seed in (0, 1, 42, -1) for rank in range(4)]
    found = [drawn(*place) for place in places]
    for kind in range(0, 12, 4):
        assert len({tuple(each[kind : kind + 4]) for each in found}) == len(places)
    assert [drawn(*place) for place in places] == found


@pytest.mark.parametrize("before", [1, 2])
def test_a_train_rank_is_seeded_whatever_ran_before(before, realm, tmp_path):  # noqa: F811
    torch.manual_seed(before)
    random.seed(before)
    np.random.seed(before)
    overrides = ["needs=[]", "policy.model_name=recipes/tiny", "policy.random_init=true", f"run_dir={tmp_path}"]
    recipe = config.load("tiny_sft", overrides)
    world = SimpleNamespace(own=dist.group.WORLD, rank=0, info=SimpleNamespace(run_dir=tmp_path), phase=contextlib.nullcontext)
    place = TrainRole(recipe, 7, world, algorithms.build(recipe), None).setup()
    assert draw() == drawn(7, place.rank)
