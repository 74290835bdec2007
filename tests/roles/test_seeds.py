"""torch's generators on train ranks: by the recipe's seed and the data-parallel rank."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline import algorithms, config
from pipeline.roles import TrainRole
from pipeline.train.state import seed_torch
from tests.train.conftest import realm  # noqa: F401


@pytest.fixture(autouse=True)
def own_state():
    with torch.random.fork_rng(devices=[]):
        yield


def drawn(seed: int, data_rank: int) -> list[float]:
    seed_torch(seed, data_rank)
    return torch.rand(4).tolist()


def test_data_ranks_and_seeds_draw_differently_and_each_always_the_same():
    places = [(seed, rank) for seed in (0, 1, 42, -1) for rank in range(4)]
    found = [drawn(*place) for place in places]
    assert len({tuple(each) for each in found}) == len(places)
    assert [drawn(*place) for place in places] == found


@pytest.mark.parametrize("before", [1, 2])
def test_a_train_rank_is_seeded_whatever_came_before(before, realm, tmp_path):  # noqa: F811
    torch.manual_seed(before)
    overrides = ["needs=[]", "policy.model_name=recipes/tiny", "policy.random_init=true", f"run_dir={tmp_path}"]
    recipe = config.load("tiny_sft", overrides)
    world = SimpleNamespace(own=dist.group.WORLD, rank=0, place=SimpleNamespace(run_dir=tmp_path), phase=contextlib.nullcontext)
    place = TrainRole(recipe, 7, world, algorithms.build(recipe), None).setup()
    assert torch.rand(4).tolist() == drawn(7, place.rank)
