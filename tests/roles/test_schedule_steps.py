"""Schedules advance once per step of the algorithm, whatever its number of updates, and resume there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from pipeline import algorithms, config
from pipeline.algorithms.token_advantages import normalization
from pipeline.data.batches import split_batch
from pipeline.roles import TrainRole
from pipeline.types import DataParallelRank, Sample
from tests.roles.test_evaluate import OVERRIDES, megatron_ended, sample  # noqa: F401
from tests.train.conftest import realm  # noqa: F401

UPDATES, EPOCHS = 2, 2
RATE, CRITICS_RATE = 1e-3, 2e-3


def warm_up(iters: int) -> str:
    return f"{{name: torch.optim.lr_scheduler.LinearLR, kwargs: {{start_factor: 0.1, total_iters: {iters}}}}}"


def share_of(step: int, iters: int) -> float:
    """Return LinearLR's factor after `step` advances."""
    return 0.1 + 0.9 * min(step, iters) / iters


def role(backend: str, path: Path, *overrides: str) -> TrainRole:
    recipe = config.load(
        "tiny_ppo",
        [
            *(f"run_dir={path}", *OVERRIDES, f"policy.{backend}_cfg.enabled=true"),
            *("ppo.num_prompts_per_step=8", "policy.train_global_batch_size=4", f"ppo.ppo_epochs={EPOCHS}"),
            *(f"policy.optimizer.kwargs.lr={RATE}", f"value.optimizer.kwargs.lr={CRITICS_RATE}"),
            *(f"policy.scheduler={warm_up(5)}", f"value.scheduler={warm_up(8)}"),
            *overrides,
        ],
    )
    world = SimpleNamespace(
        own=dist.group.WORLD, rank=0, info=SimpleNamespace(local_rank=0, run_dir=path), phase=contextlib.nullcontext
    )
    made = TrainRole(recipe, 0, world, algorithms.build(recipe), None)
    made.setup()
    return made


def learn(trained: TrainRole, step: int, models: list[str]) -> dict[str, list[dict[str, float]]]:
    """Run the coordinator's part of a step, on samples that depend on the step alone."""
    draw = np.random.default_rng(step)
    samples: list[Sample] = [sample(draw, 6 + i) for i in range(8)]
    needs, policy = trained._algorithm.needs, trained._recipe.policy
    ((*updates,),) = split_batch(samples, policy, [DataParallelRank(0, 1)], policy.train_global_batch_size)
    trained.load(updates)
    trained.forward()
    trained.standardize(normalization([trained.estimate()], needs.standardized))
    return trained.step(models)


def lrs(metrics: list[dict[str, float]]) -> list[float]:
    return [update["lr"] for update in metrics]


BOTH = ["critic", "policy"]


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_step_of_several_updates_has_one_rate(backend, megatron_ended, tmp_path):  # noqa: F811
    """A model that does not learn in a step keeps its rate. A run resumed between two steps continues bit by bit."""
    trained = role(backend, tmp_path)
    assert lrs(learn(trained, 0, ["critic"])["critic"]) == pytest.approx([CRITICS_RATE * 0.1] * (UPDATES * EPOCHS))
    for step in (1, 2):
        metrics = learn(trained, step, BOTH)
        assert lrs(metrics["policy"]) == pytest.approx([RATE * share_of(step - 1, 5)] * (UPDATES * EPOCHS))
        assert lrs(metrics["critic"]) == pytest.approx([CRITICS_RATE * share_of(step, 8)] * (UPDATES * EPOCHS))
    trained.save(str(tmp_path / "saved"))
    uninterrupted = [learn(trained, step, BOTH) for step in (3, 4)]
    resumed = role(backend, tmp_path)
    (tmp_path / "saved" / "complete.json").write_text(json.dumps({"step": 3, "metric": None, "state": {}, "files": {}}))
    resumed.restore(str(tmp_path / "saved"))
    assert [learn(resumed, step, BOTH) for step in (3, 4)] == uninterrupted
    assert lrs(uninterrupted[0]["policy"]) == pytest.approx([RATE * share_of(2, 5)] * (UPDATES * EPOCHS))


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_a_schedule_of_epochs_advances_after_each(backend, megatron_ended, tmp_path):  # noqa: F811
    """NeMo-RL's PPO calls train() once per epoch."""
    trained = role(backend, tmp_path, "ppo.schedule_every_epoch=true")
    for step in (0, 1):
        epochs = [EPOCHS * step + epoch for epoch in range(EPOCHS) for _ in range(UPDATES)]
        metrics = learn(trained, step, BOTH)
        assert lrs(metrics["policy"]) == pytest.approx([RATE * share_of(epoch, 5) for epoch in epochs])
        assert lrs(metrics["critic"]) == pytest.approx([CRITICS_RATE * share_of(epoch, 8) for epoch in epochs])
