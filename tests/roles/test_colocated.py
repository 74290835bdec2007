"""Train and generate ranks that share GPUs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from pipeline import algorithms, config, generate, main
from pipeline.job.world import RankInfo, WorkerGroups, World
from pipeline.roles import GenerateRole, TrainRole

WORKERS = WorkerGroups((0,), (1, 2), ((1, 2),), colocated=True)


class Engine:
    """An engine that can report its layout only while it has its weights, or once it is cached."""

    def __init__(self):
        self._weights, self._layout = True, None

    def layout(self) -> list:
        if self._layout is None:
            assert self._weights, "a loader reads memory that is not mapped"
            self._layout = []
        return self._layout

    def sleep(self, keep_weights: bool) -> None:
        self._weights = False


def world(rank: int, path) -> World:
    return World(RankInfo(rank, 3, rank, "here", "here", path), WORKERS, None)


@pytest.mark.parametrize("transport", ["planned", "delta", "broadcast"])
def test_an_engine_sleeps_only_after_it_has_its_layout(transport, tmp_path, monkeypatch):
    """This test's follower, which leads no episodes."""
    monkeypatch.setattr(generate, "build", lambda *_: Engine())
    recipe = config.load("tiny_grpo", [f"run_dir={tmp_path}", f"policy.generation.refit_transport={transport}"])
    monkeypatch.setattr("pipeline.roles.generate.Lockstep", lambda _: None)
    role_world = world(2, tmp_path)
    role_world.own = None
    role = GenerateRole(recipe, 0, role_world, None)
    role.setup()
    role.sleep(False)
    if transport == "broadcast":  # it is never requested, and not every model can report it
        assert role._backend._layout is None
    else:
        assert role._regions() == ([], [])


@pytest.mark.parametrize(
    ("keys", "by_ipc"),
    [((), True), (("policy.generation.colocated.refit=host",), False), (("policy.generation.colocated.enabled=false",), False)],
)
def test_a_refit_uses_ipc_if_ranks_share_gpus(keys, by_ipc, tmp_path):
    recipe = config.load("tiny_grpo", [f"run_dir={tmp_path}", "policy.generation.colocated.enabled=true", *keys])
    assert main._refit(recipe, world(0, tmp_path))._ipc == by_ipc


def test_the_transport_of_a_refit_is_chosen_by_name(tmp_path):
    with pytest.raises(config.RecipeError, match=r"colocated\.refit: got 'nvlink'; expected one of: ipc, host"):
        config.load("tiny_grpo", [f"run_dir={tmp_path}", "policy.generation.colocated.refit=nvlink"])


def test_a_trainer_that_sleeps_offloads_the_steps_batches(tmp_path):
    recipe = config.load("tiny_grpo", [f"run_dir={tmp_path}"])
    role = TrainRole(recipe, 0, world(0, tmp_path), algorithms.build(recipe), None)

    class Policy:
        moved: ClassVar[list[bool]] = []

        def offload(self, keep_weights: bool) -> None:
            assert not role._batches and not role._updates
            self.moved.append(keep_weights)

    role._models["policy"] = Policy()
    role._updates, role._batches = [object()], [[object()]]
    role.offload(True)
    assert Policy.moved == [True]
