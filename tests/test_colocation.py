"""Colocation: the order in which ranks that share GPUs sleep and wake, and the most that a GPU holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pipeline.coordination.colocation import Colocation
from tests.fake_group import FakeGroup

# Memory of each on a GPU. The engine's cache is as large as the whole trainer.
TRAINER, ENGINE = {"weights": 1, "rest": 3}, {"weights": 1, "cache": 4}


@dataclass
class GPU(FakeGroup):
    """Stands in for the verbs of both ranks and for the refit."""

    trainer: set[str] = field(default_factory=lambda: {"weights", "rest"})
    engine: set[str] = field(default_factory=set)
    has: int | None = None  # the version of the engine's weights
    version: int | None = None  # the version of the last refit
    told: list[str] = field(default_factory=list)
    most: int = 0
    incremental: bool = False

    def _tell(self, what: str) -> GPU:
        self.told.append(what)
        self.most = max(self.most, sum(TRAINER[part] for part in self.trainer) + sum(ENGINE[part] for part in self.engine))
        return self

    def result(self) -> list[None]:
        return [None]

    def offload(self, keep_weights: bool) -> GPU:
        self.trainer -= {"rest"} if keep_weights else {"rest", "weights"}
        return self._tell("offload")

    def reload(self) -> GPU:
        self.trainer = {"weights", "rest"}
        return self._tell("reload")

    def sleep(self, keep_weights: bool) -> GPU:
        assert self.engine == {"weights", "cache"}
        self.engine, self.has = set(), self.has if keep_weights else None
        return self._tell("sleep")

    def wake(self, part: str) -> GPU:
        assert part not in self.engine and (part == "weights" or "weights" in self.engine)
        self.engine.add(part)
        return self._tell("wake")

    def __call__(self, version: int) -> dict[str, float]:
        assert "weights" in self.trainer and self.engine == {"weights"}
        assert self.has is not None or version == 0 or not self.incremental
        self.has = self.version = version
        self._tell("refit")
        return {"refit/bytes_sent": 8.0}


def test_a_gpu_never_holds_both():
    gpu = GPU()
    colocation = Colocation(True, gpu, gpu, gpu)
    for version in range(3):
        cost = colocation.refit(version)
        assert cost["refit/bytes_sent"] == 8 and cost["time/sharing"] >= 0
        with colocation.generating():
            assert (gpu.trainer, gpu.engine, gpu.has) == (set(), {"weights", "cache"}, version)
        with colocation.training():
            assert (gpu.trainer, gpu.engine) == ({"weights", "rest"}, set())
    assert gpu.most == 5  # the engine alone; both together would be 9
    assert gpu.told == ["offload", "wake", "refit", "offload", "wake", "sleep", "reload"] * 3


def test_nothing_moves_without_need():
    gpu = GPU()
    colocation = Colocation(True, gpu, gpu, gpu)
    with colocation.training():
        assert not gpu.told  # the initial state
    colocation.refit(0)
    so_far = len(gpu.told)
    for _ in range(2):
        with colocation.generating():
            pass
    assert len(gpu.told) == so_far


@pytest.mark.parametrize("incremental", [False, True])
def test_engines_that_slept_get_the_same_weights_again(incremental):
    """A checkpoint was saved between two rollouts."""
    gpu = GPU(incremental=incremental)
    colocation = Colocation(True, gpu, gpu, gpu)
    colocation.refit(0)
    with colocation.training():
        assert gpu.has == (0 if incremental else None)
    with colocation.generating():
        assert gpu.has == 0 and gpu.engine == {"weights", "cache"}
    colocation.refit(1)  # from there too
    assert gpu.has == 1 and gpu.most == 5


def test_moves_around_a_checkpoint_are_reported_with_the_next_refit(monkeypatch):
    gpu = GPU()
    monkeypatch.setattr(
        "pipeline.coordination.colocation.time", SimpleNamespace(perf_counter=lambda: len(gpu.told))
    )  # a second for each
    colocation = Colocation(True, gpu, gpu, gpu)
    assert colocation.refit(0)["time/sharing"] == 4
    with colocation.training(), colocation.generating():
        pass
    with colocation.training():
        assert colocation.refit(1)["time/sharing"] == 2 + 4 + 2 + 4


def test_ranks_with_their_own_gpus_get_no_orders():
    gpu = GPU(engine={"weights"})
    colocation = Colocation(False, gpu, gpu, gpu)
    with colocation.generating(), colocation.training():
        pass
    assert colocation.refit(7) == {"refit/bytes_sent": 8.0} and gpu.told == ["refit"]
