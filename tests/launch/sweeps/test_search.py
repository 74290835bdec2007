"""The sweep command with a search of trivial runs: complete, pruned, failed, killed and gone on."""

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("optuna")

from launch.api import sweeps as api
from launch.submission.prepare import examine
from launch.sweeps import submission
from launch.sweeps import suite as suites
from launch.sweeps.search_loop import JOURNAL, TrialStudy
from launch.sweeps.search_space import SearchConfig
from launch.sweeps.sweep_folder import SweepFolder
from pipeline.config import RecipeError
from tests.launch.sweeps import tasks
from tests.launch.sweeps.suites import KL, LR, environment, in_process, known, launch, starts, submitted, sweep, write_search
from tests.launch.waiting import wait_until

ASHA = {"pruner": "asha", "min_steps": 2, "reduction_factor": 2}


@pytest.fixture
def here(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    return in_process(monkeypatch, capsys, tasks.climb)


def trials(folder: Path) -> list[tuple[str, float, float | None]]:
    """Return (state, learning rate, value) of each trial of a search that has ended."""
    found = json.loads((folder / "verdict.json").read_text())["trials"]
    return [(each["state"], each["values"][LR], each["value"]) for each in found]


def test_worse_trials_are_stopped_and_the_best_is_told(tmp_path, here):
    path = write_search(tmp_path, **ASHA, parameters={LR: [1.0, 0.5, 0.25]}, parallel=1)
    status, output = here(f"sweep={path}", "id=x")
    assert status == 0, output
    folder = tmp_path / "sweeps/some/x"
    assert trials(folder) == [("complete", 1.0, 4.0), ("pruned", 0.5, 1.0), ("pruned", 0.25, 0.5)]
    assert submitted(folder) == ["trial-0000", "trial-0001", "trial-0002"] and [*starts(folder).values()] == [1, 1, 1]
    assert all(attempt.read_text() for attempt in folder.glob("runs/trial-000[12]/attempts/*/stop"))
    verdict = json.loads((folder / "verdict.json").read_text())
    assert verdict["passed"] and verdict["best"]["name"] == "trial-0000" and verdict["trials"][1]["pruned_at"] == 2
    assert "1 complete, 2 pruned; " in output and "pruning saved about 16" in output  # 2 steps of 2 s on 2 ranks, twice
    assert "best: train/reward 4 of trial-0000" in output and f"recipe={tmp_path}/tiny.yaml {LR}=1.0" in output

    run = api.SweepRun(folder)
    assert run.states() == {"trial-0000": "done", "trial-0001": "pruned", "trial-0002": "pruned"}
    assert [(each.state, each.pruned_at) for each in run.trials()] == [("complete", None), ("pruned", 2), ("pruned", 2)]

    page = (folder / "report.html").read_text()
    assert (folder / "plotly.min.js").exists() and page.count('class="drawing-data"') == 2
    for text in ('href="runs/trial-0002/recipe.yaml"', "pruned at step 2", "Parallel coordinates", "Best value over trials"):
        assert text in page

    status, output = here(f"sweep={path}", "id=x")
    assert status == 0 and "is complete; id=NAME begins another search" in output and [*starts(folder).values()] == [1, 1, 1]
    status, output = here(f"sweep={path}", "id=x", "dry_run=true")
    assert status == 0 and f"{LR}=0.5 run_dir={folder}/runs/trial-0001 cluster.executor=local  pruned 1" in output
    status, output = here(f"check={folder}")
    assert status == 0 and "1 complete, 2 pruned" in output
    status, output = here(f"sweep={path}", "id=x", "search.seed=9")
    assert status == 2 and "search.seed: got 9; expected 0, with which " in output


def test_a_failed_trial_is_told_and_does_not_end_the_search(tmp_path, here):
    path = write_search(tmp_path, parameters={LR: [0.5, 1.0]}, parallel=2)
    status, output = here(f"sweep={path}", "id=x", fails="trial-0000:1")
    assert status == 0, output
    folder = tmp_path / "sweeps/some/x"
    assert trials(folder) == [("failed", 0.5, None), ("complete", 1.0, 4.0)] and [*starts(folder).values()] == [1, 1]
    assert "trial-0000: failed: rank 0 (realm train, host here, verb step): the dog ate it" in output
    assert "the dog ate it" in (folder / "report.html").read_text()


@pytest.mark.full
def test_a_trial_whose_recipe_is_refused_inside_the_space_has_failed(tmp_path, here):
    """The corners 2 and 4 prompts fit the batch of 4; 3 in between do not."""
    prompts = "grpo.num_prompts_per_step"
    path = write_search(tmp_path, parameters={prompts: {"low": 2, "high": 4, "step": 1}, LR: [1.0]})
    status, output = here(f"sweep={path}", "id=x")
    assert status == 0, output
    folder = tmp_path / "sweeps/some/x"
    assert [each[0] for each in trials(folder)] == ["complete", "failed", "complete"]
    assert "trial-0001: failed: " in output and not (folder / "runs/trial-0001/starts").exists()


def test_what_a_killed_process_left_is_taken_up(tmp_path, here, monkeypatch):
    """A trial that is recorded and not submitted, one that is not recorded, one without values, a torn journal and its lock."""
    path = write_search(tmp_path, parameters={LR: [1.0, 2.0, 4.0]}, parallel=1)
    folder = SweepFolder(tmp_path / "sweeps/some/x")
    with monkeypatch.context() as patched:
        patched.setattr("launch.sweeps.submission.start", Mock(side_effect=KeyboardInterrupt))
        assert here(f"sweep={path}", "id=x")[0] == 130
    assert [job.name for job in folder.plan.jobs] == ["trial-0000"] and not (folder.path / "runs").exists()
    search = folder.suite.search
    assert search is not None
    study = TrialStudy(folder.path, search, 4)
    assert study.ask().values == {LR: 2.0}
    study._study.enqueue_trial({LR: 4.0}, user_attrs={"grid point": 2})
    study._study.ask()
    with open(folder.path / JOURNAL, "a") as journal:
        journal.write('{"op_code": 5, "worker')
    (folder.path / f"{JOURNAL}.lock").symlink_to(JOURNAL)

    before = (folder.path / JOURNAL).read_bytes()
    status, output = here(f"sweep={path}", "id=x", "dry_run=true")  # as if that process were alive
    assert status == 0 and "trial-0000: " in output and output.rstrip().endswith("running")
    assert (folder.path / JOURNAL).read_bytes() == before and (folder.path / f"{JOURNAL}.lock").is_symlink()

    status, output = here(f"sweep={path}", "id=x")
    assert status == 0, output
    assert trials(folder.path) == [("complete", 1.0, 4.0), ("complete", 2.0, 8.0), ("complete", 4.0, 16.0)]
    assert [*starts(folder.path).values()] == [1, 1, 1] and len(submitted(folder.path)) == 3
    assert [each["name"] for each in json.loads((folder.path / "verdict.json").read_text())["trials"]][2] == "trial-0003"


def test_a_search_waits_for_one_who_only_looks(tmp_path, here, monkeypatch):
    """A program that asks whether anybody works on a sweep holds its lock for a moment."""
    looking = contextlib.ExitStack()
    looking.enter_context(SweepFolder(tmp_path / "sweeps/some/x").locked())
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: looking.close())
    monkeypatch.setattr("launch.runs.folder_lock.time", clock)
    assert here(f"sweep={write_search(tmp_path, parameters={LR: [1.0]})}", "id=x")[0] == 0


@pytest.mark.full
def test_a_cancelled_search_submits_nothing_more_and_goes_on_later(tmp_path, here):
    path = write_search(tmp_path, parameters={LR: [0.5, 1.0]})  # 0.5 waits to be asked
    folder = tmp_path / "sweeps/some/x"
    process = launch(f"sweep={path}", "id=x", env=environment(HETSTEP_TEST_TASK="tests.launch.sweeps.tasks:climb"))
    wait_until(lambda: [*folder.glob("runs/trial-0000/starts")], "the first trial", 120)
    run = api.SweepRun(folder)
    assert run.state() == "running" and run.cancel() == "cancelled"
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "was cancelled" in output
    assert run.states() == {"trial-0000": "failed"}
    status, output = here(f"sweep={path}", "id=x")
    assert status == 0, output
    assert [each[0] for each in trials(folder)] == ["failed", "complete"] and run.state() == run.cancel() == "passed"


@pytest.mark.full
def test_a_killed_search_goes_on_and_submits_nothing_twice(tmp_path):
    """Kill it after 0, 1, 2 and 3 submissions; and once delete its record of a run."""
    path = write_search(tmp_path, parameters={LR: [1.0, 2.0, 3.0, 4.0]}, parallel=2)
    env = environment(HETSTEP_TEST_SLEEP="2", HETSTEP_TEST_TASK="tests.launch.sweeps.tasks:climb")
    folder = tmp_path / "sweeps/some/x"
    for count in range(4):
        process = launch(f"sweep={path}", "id=x", env=env)
        wait_until(lambda count=count: known(folder) >= count, f"{count} submissions")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if count == 2:
            (folder / "runs/trial-0001/job.json").unlink()
            (folder / "jobs.jsonl").write_text('{"job": "trial-0000", "jo')
    status, output = sweep(f"sweep={path}", "id=x", env=env)
    assert status == 0, output
    assert [*starts(folder).values()] == [1, 1, 1, 1]
    assert sorted(trials(folder)) == [("complete", rate, 4 * rate) for rate in (1.0, 2.0, 3.0, 4.0)]


def test_a_restarted_sampler_draws_what_one_that_was_not_killed_draws(tmp_path):
    ranges = {LR: {"low": 1e-5, "high": 1e-2, "log": True}, KL: {"low": 0, "high": 0.3}}
    for sampler in ("random", "tpe", "cmaes"):
        path = write_search(tmp_path, sampler=sampler, trials=12, parameters=ranges)
        search = suites.load(str(path)).suite.search
        assert search is not None
        drawn: dict[bool, list] = {}
        for restarts in (False, True):
            folder = tmp_path / f"{sampler}-{restarts}"
            folder.mkdir()
            study = TrialStudy(folder, search, 4)
            for _ in range(12):
                trial = study.ask()
                study.end(trial.number, "complete", -abs(trial.values[LR] - 1e-3))
                study = TrialStudy(folder, search, 4) if restarts else study
            drawn[restarts] = [trial.values for trial in study.trials()]
            assert set(study.importances()) == {LR, KL}
        assert drawn[True] == drawn[False], sampler
        assert len({each[LR] for each in drawn[True]}) == 12


def test_the_command_refuses_a_budget_that_is_too_small_and_writes_nothing(tmp_path, here):
    ranges = {LR: {"low": 1e-7, "high": 1e-6, "log": True}}
    path = write_search(tmp_path, recipe="llama8b_grpo", overrides={}, parameters=ranges, sampler="tpe", trials=8)
    status, output = here(f"sweep={path}", "id=x", "search.budget_gpu_hours=1000", "cluster.executor=local")
    plan = examine("llama8b_grpo", ["cluster.executor=local"], dry=True).prepared[-1].plan
    assert plan is not None and plan.gpu_hours is not None and plan.gpu_hours > 125
    price = f"{8 * plan.gpu_hours:,.4g} GPU-hours by the plan: 8 trials x {plan.gpu_hours:,.4g} GPU-hours with validations"
    assert status == 2 and f"search.budget_gpu_hours: got 1000; expected at least {price}" in output
    assert "500 steps of" in output and "on 16 GPUs" in output
    assert f"Try at most {math.floor(1000 / plan.gpu_hours)} trials" in output
    assert not (tmp_path / "sweeps").exists()
    budget = SearchConfig(trials=8, budget_gpu_hours=1e6)
    assert not [*submission.budget_problems(budget, submission.price_of(budget, [plan]))]


@pytest.mark.full
def test_a_program_begins_a_search_and_waits_for_its_verdict(tmp_path, monkeypatch):
    for key, value in environment(HETSTEP_TEST_TASK="tests.launch.sweeps.tasks:climb").items():
        monkeypatch.setenv(key, value)
    path = write_search(tmp_path, parameters={LR: [1.0]})
    with pytest.raises(RecipeError) as refused:
        api.sweep(path, {f"search.parameters.{LR}.choices": "many"}, id="x")
    assert refused.value.problems
    run = api.sweep(path, id="x")
    verdict = run.wait(240)
    assert verdict.passed and "1 of 1 trials: 1 complete" in verdict.summary and run.states() == {"trial-0000": "done"}
    assert run.runs()["trial-0000"].metrics("train/reward") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
