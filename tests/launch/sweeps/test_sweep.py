"""The sweep command on this machine, with trivial runs: complete, killed and resumed, retried, regressed."""

import json
import os
import signal
from collections.abc import Callable

import pytest

from launch import sweep as sweep_command
from launch.executors import slurm_client
from launch.sweeps import suite
from launch.sweeps.submission import jobs_of
from launch.sweeps.sweep_folder import SweepFolder, SweepPlan
from tests.launch.model import write_recipe
from tests.launch.sweeps import tasks
from tests.launch.sweeps.suites import environment, in_process, known, launch, outcomes, starts, submitted, sweep, write_suite
from tests.launch.waiting import wait_until

ONE_SEED = {"seeds": [1], "gates": {"on policy": {"value": "at(train/ppo_kl, 1)", "equals": 0}}}


@pytest.fixture
def here(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    return in_process(monkeypatch, capsys, tasks.learn)


def test_following_reads_the_queue_once_a_turn(tmp_path, monkeypatch, capsys):
    asked = suite.load(str(write_suite(tmp_path)))
    folder = SweepFolder(tmp_path / "x")
    with folder.locked():
        folder.begin(asked.suite, SweepPlan("x", "slurm", str(tmp_path), "", [], jobs_of(asked, folder.path)[0]))
    commands = []
    monkeypatch.setattr(slurm_client, "run_command", lambda *command: commands.append(command) or "")
    monkeypatch.setattr(sweep_command, "POLL_S", 0.0)
    assert sweep_command.follow(folder) == 1 and "ended without a verdict" in capsys.readouterr().err
    assert commands == [("scontrol", "show", "job", "-o")] * 2  # the second looks for the check again, after a pause


@pytest.mark.full  # by default: test_gates.py
def test_a_sweep_makes_a_baseline_and_then_finds_a_regression(tmp_path, here):
    command = [f"sweep={write_suite(tmp_path, seeds=[1])}", "gates.loss.band.floor=0.01"]
    status, output = here(*command, "id=good", "update_baseline=true")
    assert status == 0, output
    good = tmp_path / "sweeps/some/good"
    assert f"note: wrote a new baseline: {tmp_path}/baselines/some.yaml" in output
    assert "some good: passed: 8 passed" in output
    assert {"report.html", "report.md", "junit.xml", "verdict.json", "suite.yaml"} <= {path.name for path in good.iterdir()}

    status, output = here(*command, "id=good")
    assert status == 0 and "is complete; id=NAME begins another" in output
    assert starts(good) == {"a-1": 1, "b-1": 1}

    status, output = here(*command, "id=good", "seeds=[3]")
    assert status == 2 and "seeds: got [3]; expected [1], with which " in output

    bad = ["id=bad", "runs.b.overrides.policy.optimizer.kwargs.lr=5.0"]  # what write_suite gives, times 10
    status, output = here(*command, *bad)
    assert status == 1, output
    assert [key for key, outcome in outcomes(tmp_path / "sweeps/some/bad").items() if outcome != "passed"] == [("b", "loss")]
    assert "failed: b, loss: 1.25, mean of the seeds; expected at most 0.155" in output

    for repeated in ([f"check={tmp_path}/sweeps/some/bad"], [*command, *bad]):
        status, output = here(*repeated)
        assert status == 1 and "failed: b, loss: 1.25" in output


@pytest.mark.full
def test_a_run_that_fails_is_retried_once_and_marked(tmp_path, here):
    path = write_suite(tmp_path, **ONE_SEED)
    status, output = here(f"sweep={path}", "id=x", fails="a-1:1,b-1:2")
    assert status == 1, output
    folder = tmp_path / "sweeps/some/x"
    assert starts(folder) == {"a-1": 2, "b-1": 2}
    assert sorted(submitted(folder)) == ["a-1", "a-1", "b-1", "b-1"]
    assert outcomes(folder) == {
        ("a", "seed 1 completes"): "passed",
        ("b", "seed 1 completes"): "failed",
        ("a", "on policy"): "passed",
        ("b", "on policy"): "not judged",
    }
    said = {each["run"]: each["said"] for each in json.loads((folder / "verdict.json").read_text())["verdicts"][:2]}
    dog = "rank 0 (realm train, host here, verb step): the dog ate it"
    assert said == {"a": f"RETRIED: done at try 2; before: {dog}", "b": f"failed 2 times, first: {dog}"}
    assert f"passed: a, seed 1 completes: {said['a']}" in output


@pytest.mark.parametrize("counts", [(2,), pytest.param(range(4), marks=pytest.mark.full)], ids=["once", "four times"])
def test_a_killed_sweep_resumes_and_runs_nothing_twice(tmp_path, counts):
    """Kill it after each count of recorded submissions; and once delete its record of a running run."""
    path = write_suite(tmp_path, **{**ONE_SEED, "seeds": [1, 2]})
    env = environment(HETSTEP_TEST_SLEEP="2")
    folder = tmp_path / "sweeps/some/x"
    for count in counts:
        process = launch(f"sweep={path}", "id=x", env=env)
        wait_until(lambda count=count: known(folder) >= count, f"{count} submissions", seconds=300)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if count == 2:
            (folder / "runs/a-2/job.json").unlink(missing_ok=True)
            (folder / "runs/b-1/job.json").unlink()
            (folder / "jobs.jsonl").write_text('{"job": "a-1", "jo')
    status, output = sweep(f"sweep={path}", "id=x", env=env)
    assert status == 0, output
    assert starts(folder) == {"a-1": 1, "b-1": 1, "a-2": 1, "b-2": 1}
    assert set(outcomes(folder).values()) == {"passed"}


def test_concurrent_sweeps_are_refused(tmp_path, here):
    command = [f"sweep={write_suite(tmp_path, **ONE_SEED)}", "id=x"]
    with SweepFolder(tmp_path / "sweeps/some/x").locked():
        status, output = here(*command)
    assert status == 2 and "[in-use]" in output
    assert not (tmp_path / "sweeps/some/x/sweep.json").exists()


@pytest.mark.long
def test_a_needed_run_runs_once_for_all_runs(tmp_path, here, monkeypatch):
    path = write_suite(tmp_path, **ONE_SEED, overrides={"needs": ["needed"]})
    write_recipe(tmp_path, "needed").rename(tmp_path / "needed")  # found by its bare name in the current folder
    monkeypatch.chdir(tmp_path)
    status, output = here(f"sweep={path}", "id=bad", fails="needed:2")
    assert status == 1, output
    bad = tmp_path / "sweeps/some/bad"
    assert submitted(bad) == ["needed", "needed"] and not list(bad.glob("runs/*"))
    verdicts = json.loads((bad / "verdict.json").read_text())["verdicts"]
    assert [(each["run"], each["outcome"], each["said"]) for each in verdicts[:3]] == [
        ("needed", "failed", "failed 2 times, first: rank 0 (realm train, host here, verb step): the dog ate it"),
        ("a", "failed", "was not submitted, because needed failed"),
        ("b", "failed", "was not submitted, because needed failed"),
    ]
    status, output = here(f"sweep={path}", "id=good", fails="needed:2")  # an old failure is none of this sweep's
    assert status == 0, output
    good = tmp_path / "sweeps/some/good"
    assert submitted(good)[0] == "needed" and sorted(submitted(good)) == ["a-1", "b-1", "needed"]
    assert starts(good) == {"a-1": 1, "b-1": 1}
