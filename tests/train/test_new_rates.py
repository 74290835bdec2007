"""A backend that takes other learning rates between two steps equals one that resumes with them, to the last bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline import config
from pipeline.config import MegatronOptimizerConfig, MegatronSchedulerConfig, OptimizerConfig, PolicyConfig, RecipeError
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole, TrainBackend
from tests.train import cases
from tests.train.megatron import layouts

LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 8}}
EXPONENTIAL = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.9}}
WARMUP = [LINEAR, EXPONENTIAL, {"milestones": [4]}]
SLOW = OptimizerConfig(kwargs={"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1})
OWN = MegatronOptimizerConfig(lr=1e-3, min_lr=1e-5, clip_grad=None)
COSINE = MegatronSchedulerConfig(lr_decay_style="cosine", lr_decay_iters=9, lr_warmup_iters=2)


@pytest.fixture
def realm(realm):
    """Destroy Megatron-Core's groups with the realm."""
    yield
    layouts.release()


def policy(**changes) -> PolicyConfig:
    return cases.policy(config.RECIPES / "tiny", random_init=True, **changes)


def built(of: PolicyConfig, backend: str, own: dict) -> TrainBackend:
    if backend == "dtensor":
        return FSDPBackend(of, dist.group.WORLD, 7, ModelRole())
    return layouts.backend(of, role=ModelRole(), **own)


def weights(trained: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trained.weights()}


@pytest.mark.parametrize(
    ("backend", "changes", "own"),
    [
        ("dtensor", {"optimizer": SLOW}, {}),
        pytest.param("dtensor", {"optimizer": SLOW, "scheduler": None}, {}, marks=pytest.mark.full),
        ("dtensor", {"scheduler": WARMUP}, {}),
        pytest.param("megatron", {"optimizer": SLOW}, {}, marks=pytest.mark.full),
        pytest.param("megatron", {"scheduler": EXPONENTIAL}, {}, marks=pytest.mark.full),
        ("megatron", {}, {"optimizer": MegatronOptimizerConfig(lr=4e-4, min_lr=1e-6, clip_grad=None), "scheduler": COSINE}),
    ],
)
@pytest.mark.usefixtures("realm")
def test_other_rates_equal_a_resume_with_them(tmp_path: Path, backend: str, changes: dict, own: dict) -> None:
    before = {"optimizer": OWN, "scheduler": COSINE} if own else {}
    trained, batch = built(policy(scheduler=LINEAR), backend, before), [cases.pack([1, 2])]
    for _ in range(3):
        cases.learn(trained, batch)
    other = policy(**{"scheduler": LINEAR, **changes})
    other.megatron_cfg = copy.deepcopy(trained._policy.megatron_cfg)
    for name, section in own.items():
        setattr(other.megatron_cfg, name, section)
    unchanged = trained.shards(copy=True)
    take = trained.new_rates(other)
    assert trained.shards().record == unchanged.record  # nothing changes before it is called
    take()
    trained.shards().write(tmp_path, 0)
    found = [cases.learn(trained, batch) for _ in range(3)]
    expected = weights(trained)
    assert found[0]["lr"] != pytest.approx(cases.learn(built(policy(scheduler=LINEAR), backend, before), batch)["lr"])

    resumed = built(policy(scheduler=LINEAR), backend, before)
    resumed.new_rates(other)()  # as a run does that resumes: its recipe.yaml has the rates of its submission
    resumed.load(tmp_path)
    assert [cases.learn(resumed, batch) for _ in range(3)] == found
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())

    if not own:
        anew = built(copy.deepcopy(other), backend, {})
        anew.load(tmp_path)
        assert [cases.learn(anew, batch) for _ in range(3)] == found


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.usefixtures("realm")
def test_a_schedule_that_cannot_be_built_leaves_everything_as_it_is(backend: str) -> None:
    trained, batch = built(policy(scheduler=LINEAR), backend, {}), [cases.pack([1])]
    cases.learn(trained, batch)
    before = trained.shards().record
    other = policy(scheduler={"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"steps": 3}})
    other.megatron_cfg = trained._policy.megatron_cfg
    with pytest.raises(RecipeError):
        trained.new_rates(other)
    assert trained.shards().record == before
    cases.learn(trained, batch)
