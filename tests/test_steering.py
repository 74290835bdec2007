"""Changes of a live run on rank 0: requests, answers, and the exact replay of both. Without ranks, over real files."""

import copy
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config import Recipe, live_keys, load
from pipeline.files.storage import NO_RETRIES
from pipeline.steering import steer_files
from pipeline.steering.live_changes import MARKER, Steering
from pipeline.steering.steer_files import path_of
from tests.data.test_mixture import mixture
from tests.fake_group import FakeGroup

LR = "policy.optimizer.kwargs.lr"
STEPS = "grpo.max_num_steps"


class Ranks(FakeGroup):
    """The train ranks, reduced to what they are told. A rank cannot take the values in `wrong`."""

    def __init__(self):
        self.told: list[dict] = []
        self.wrong: dict[str, str] = {}

    def examine_change(self, values: dict):
        found = [self.wrong.get(key, "") for key in values]
        return SimpleNamespace(result=lambda: ["", *found])

    def change(self, values: dict):
        self.told.append(values)
        return SimpleNamespace(result=lambda: [None])


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load("tiny_grpo", ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false"))


class Started:
    """Rank 0 of a new start of the run in a folder, resumed from a checkpoint's step and state."""

    def __init__(self, recipe: Recipe, folder: Path, step: int = 0, state: tuple | list = ()):
        self.recipe, self.ranks = copy.deepcopy(recipe), Ranks()
        self.stream = mixture({"few": 1.0})._streams["few"]
        self.steering = Steering(self.recipe, folder, self.ranks, NO_RETRIES)
        self.steering.resume(step, json.loads(json.dumps(list(state))), self.stream)

    def end(self, step: int) -> float | None:
        return self.steering.step_ended(step, self.stream).get(MARKER)

    @property
    def values(self) -> tuple:
        return live_keys.value_at(self.recipe, LR), self.recipe.grpo.max_num_steps


def answered(folder: Path) -> list[tuple[int, int, str]]:
    return [(each.request, each.step, each.refused) for each in steer_files.answers(folder)]


# ---- files --------------------------------------------------------------------------------------------------------------


def test_requests_at_once_get_different_numbers_and_are_whole(tmp_path):
    begin = threading.Barrier(8)

    def ask(value: int) -> None:
        begin.wait()
        steer_files.ask(tmp_path, {STEPS: value})

    threads = [threading.Thread(target=ask, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steer_files.numbers(tmp_path) == list(range(1, 9))
    found = [steer_files.read_request(tmp_path, number) for number in range(1, 9)]
    assert sorted(request.values[STEPS] for request in found) == list(range(8)) and all(request.user for request in found)
    assert len(list((tmp_path / "steer").iterdir())) == 8  # nothing is left behind


def test_only_files_of_this_user_are_requests(tmp_path):
    steer_files.ask(tmp_path, {STEPS: 3})
    path_of(tmp_path, 2).write_text("[]")
    path_of(tmp_path, 3).symlink_to(path_of(tmp_path, 1))
    for number in (2, 3):
        with pytest.raises(ValueError, match="is not a steering request"):
            steer_files.read_request(tmp_path, number)


# ---- rank 0 -------------------------------------------------------------------------------------------------------------


def test_requests_take_effect_in_their_order(tmp_path, recipe):
    run = Started(recipe, tmp_path)
    assert run.end(1) is None
    steer_files.ask(tmp_path, {LR: 1e-5, STEPS: 9})
    steer_files.ask(tmp_path, {LR: 2e-5})
    assert run.end(2) == 3.0 and run.values == (2e-5, 9)
    assert run.ranks.told == [{LR: 1e-5, STEPS: 9}, {LR: 2e-5}]
    assert answered(tmp_path) == [(1, 2, ""), (2, 2, "")]
    (first, second) = steer_files.answers(tmp_path)
    assert [(c.key, c.old, c.new, c.submitted) for c in second.changes] == [(LR, 1e-5, 2e-5, 1e-4)]
    assert first.changes[1].old == recipe.grpo.max_num_steps
    assert run.end(3) is None


def test_what_is_refused_changes_nothing(tmp_path, recipe):
    run = Started(recipe, tmp_path)
    run.ranks.wrong = {"policy.scheduler": "policy.scheduler.kwargs: no such argument"}
    for values in ({"grpo.seed": 3}, {STEPS: "x"}, {"policy.scheduler": {"name": "a.b"}, LR: 1e-5}, {"no": 1}):
        steer_files.ask(tmp_path, values)
    path_of(tmp_path, 5).write_text("{")
    steer_files.ask(tmp_path, {STEPS: 9})
    assert run.end(1) == 1.0 and run.values == (1e-4, 9) and run.ranks.told == [{STEPS: 9}]
    found = answered(tmp_path)
    assert [bool(refused) for _, _, refused in found] == [True] * 5 + [False]
    assert found[2][2] == "policy.scheduler.kwargs: no such argument" and "is not a steering request" in found[4][2]
    assert run.steering.state_dict()[0]["request"] == 6


def test_a_withdrawn_request_and_one_that_came_too_late(tmp_path, recipe):
    run = Started(recipe, tmp_path)
    steer_files.ask(tmp_path, {STEPS: 9})
    path_of(tmp_path, 1).unlink()
    assert run.end(1) is None and answered(tmp_path) == []
    steer_files.ask(tmp_path, {STEPS: 8})
    run.steering.run_ended(4)
    assert answered(tmp_path) == [(1, 4, "the run ended at step 4 before the change could take effect")]


def test_a_request_that_excludes_another_is_refused(tmp_path, recipe):
    """Each is valid alone: steer.py has let both pass."""
    given = copy.deepcopy(recipe)
    live_keys.put(given, {"grpo.stop_at_validation_metric": "val/reward", "grpo.stop_patience": 3, "grpo.val_period": 2})
    run = Started(given, tmp_path)
    steer_files.ask(tmp_path, {"grpo.stop_at_validation_metric": None, "grpo.stop_patience": None})
    steer_files.ask(tmp_path, {"grpo.stop_patience": 5})
    assert run.end(1) == 2.0
    (_, second) = answered(tmp_path)
    assert "grpo.stop_at_validation_metric is null" in second[2] and run.recipe.grpo.stop_patience is None


# ---- replay -------------------------------------------------------------------------------------------------------------


def test_a_restart_repeats_changes_after_the_same_steps(tmp_path, recipe):
    run, states, values = Started(recipe, tmp_path), {0: []}, {0: (1e-4, recipe.grpo.max_num_steps)}
    for step in range(1, 6):
        if step in (2, 4):
            steer_files.ask(tmp_path, {LR: step * 1e-5})
        run.end(step)
        states[step], values[step] = run.steering.state_dict(), run.values
    assert [values[step][0] for step in range(6)] == [1e-4, 1e-4, 2e-5, 2e-5, 4e-5, 4e-5]
    whole = answered(tmp_path)
    for begin in range(6):
        again = Started(recipe, tmp_path, begin, states[begin])
        assert again.values == values[begin]
        for step in range(begin + 1, 6):
            assert again.end(step) == (1.0 if step in (2, 4) else None)
            assert again.values == values[step] and again.steering.state_dict() == states[step]
    assert answered(tmp_path) == whole  # told once


def test_new_requests_wait_for_the_end_of_the_replay(tmp_path, recipe):
    """Otherwise an older change would take the place of a newer one."""
    run = Started(recipe, tmp_path)
    steer_files.ask(tmp_path, {LR: 1e-5})
    run.end(3)
    again = Started(recipe, tmp_path, 1)
    steer_files.ask(tmp_path, {LR: 7e-5})
    assert again.end(2) is None
    assert again.end(3) == 2.0 and again.values[0] == 7e-5
    assert answered(tmp_path) == [(1, 3, ""), (2, 3, "")]


def test_an_interrupted_answer_counts_as_not_written(tmp_path, recipe):
    run = Started(recipe, tmp_path)
    steer_files.ask(tmp_path, {LR: 1e-5})
    run.end(1)
    steer_files.ask(tmp_path, {LR: 2e-5})
    with open(tmp_path / steer_files.ANSWERS, "a") as file:
        file.write('{"request": 2, "st')
    again = Started(recipe, tmp_path, 1, run.steering.state_dict())
    assert again.end(2) == 1.0 and again.values[0] == 2e-5
    assert answered(tmp_path) == [(1, 1, ""), (2, 2, "")]


def test_a_later_submission_replaces_a_change(tmp_path, recipe):
    run = Started(recipe, tmp_path)
    steer_files.ask(tmp_path, {LR: 1e-5, STEPS: 4})
    run.end(1)
    later = copy.deepcopy(recipe)
    live_keys.put(later, {STEPS: 20})
    again = Started(later, tmp_path, 1, run.steering.state_dict())
    assert again.values == (1e-5, 20) and again.ranks.told == [{LR: 1e-5}]
