"""Sweeps on a real Slurm, with trivial runs: the limit of concurrent runs, the final check, retries, and kills."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.api.sweeps import SweepRun
from tests.launch.sweeps.suites import environment, known, launch, outcomes, submitted, sweep, write_suite
from tests.launch.waiting import wait_until

pytestmark = pytest.mark.slurm
SUITE = {"seeds": [1], "max_concurrent": 1, "gates": {"on policy": {"value": "at(train/ppo_kl, 1)", "equals": 0}}}
ON_SLURM = ("cluster.executor=slurm", "cluster.time_min=5")


def jobs(env: dict) -> list[dict[str, str]]:
    """Return every job of Slurm by scontrol's keys; of a heterogeneous job its leader."""
    answer = subprocess.run(["scontrol", "show", "job", "-o"], env=env, capture_output=True, text=True, check=True)
    found = [dict(word.partition("=")[::2] for word in line.split()) for line in answer.stdout.splitlines() if "JobId=" in line]
    return [job for job in found if job.get("HetJobOffset", "0") == "0"]


def of(folder: Path, env: dict) -> list[dict[str, str]]:
    """Return the jobs of one sweep in the order of submission; the last is the check."""
    found = [job for job in jobs(env) if job.get("StdOut", "").startswith(str(folder))]
    return sorted(found, key=lambda job: int(job["JobId"]))


@pytest.mark.long
def test_the_check_retries_failed_runs_once_and_then_judges(slurm_cluster, tmp_path):
    path = write_suite(tmp_path, **{**SUITE, "max_concurrent": 2})
    folder = tmp_path / "sweeps/some/x"
    env = environment(slurm_cluster.env, HETSTEP_TEST_FAILS="a-1:1,b-1:2")
    status, output = sweep(f"sweep={path}", "id=x", "wait=true", *ON_SLURM, env=env)
    assert status == 1, output
    assert sorted(submitted(folder)) == ["a-1", "a-1", "b-1", "b-1"]
    assert [job["JobName"] for job in of(folder, env)] == ["tiny", "tiny", "some-check", "tiny", "tiny", "some-check"]
    assert outcomes(folder)["a", "seed 1 completes"] == "passed"
    assert outcomes(folder)["b", "seed 1 completes"] == "failed"
    dog = "rank 0 (realm train, host here, verb step): the dog ate it"
    assert f"| a | seed 1 completes | ✅ | RETRIED: done at try 2; before: {dog} |" in output
    assert f"- **b, seed 1 completes**: failed 2 times, first: {dog}" in output


@pytest.mark.long
def test_a_sweep_killed_during_submission_resumes_and_submits_nothing_twice(slurm_cluster, tmp_path):
    """Kill it after 0 to 4 submissions, and delete its record of a run that only Slurm knows of then."""
    path = write_suite(tmp_path, **{**SUITE, "seeds": [1, 2], "max_concurrent": 2})
    folder = tmp_path / "sweeps/some/x"
    env = environment(slurm_cluster.env, HETSTEP_TEST_SLEEP="1")
    for count in range(5):
        process = launch(f"sweep={path}", "id=x", *ON_SLURM, env=env)
        wait_until(lambda count=count: known(folder) >= count, f"{count} submissions")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if count == 3:
            last = max(folder.glob("runs/*/job.json"), key=lambda path: int(json.loads(path.read_text())["job_id"]))
            last.unlink()
    status, output = sweep(f"sweep={path}", "id=x", "wait=true", *ON_SLURM, env=env)
    assert status == 0, output
    assert [job["JobName"] for job in of(folder, env)] == ["tiny"] * 4 + ["some-check"]
    assert set(outcomes(folder).values()) == {"passed"}


@pytest.mark.long
def test_a_cancelled_check_is_reported_and_the_same_command_judges(slurm_cluster, tmp_path):
    command = [f"sweep={write_suite(tmp_path, **SUITE)}", "id=x", *ON_SLURM]
    folder = tmp_path / "sweeps/some/x"
    env = environment(slurm_cluster.env, HETSTEP_TEST_SLEEP="8")
    process = launch(*command, "wait=true", env=env)
    wait_until(lambda: len(of(folder, env)) == 3, "the check's submission")
    subprocess.run(["scancel", of(folder, env)[-1]["JobId"]], env=env, check=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "the check ended without a verdict" in output
    status, output = sweep(*command, "wait=true", env=env)
    assert status == 0, output
    assert sorted(submitted(folder)) == ["a-1", "b-1"]


@pytest.mark.full
def test_a_cancelled_sweep_leaves_no_job_and_goes_on_later(slurm_cluster, tmp_path, monkeypatch):
    command = [f"sweep={write_suite(tmp_path, **SUITE)}", "id=x", *ON_SLURM]
    folder = tmp_path / "sweeps/some/x"
    status, output = sweep(*command, env=environment(slurm_cluster.env, HETSTEP_TEST_SLEEP="600"))
    assert status == 0, output
    slurm_cluster.enter(monkeypatch)
    run = SweepRun(folder)
    assert run.state() == "running" and run.cancel() == "cancelled"
    env = environment(slurm_cluster.env)
    assert {job["JobState"] for job in of(folder, env)} == {"CANCELLED"} and len(of(folder, env)) == 3
    status, output = sweep(*command, "wait=true", env=env)
    assert status == 0 and run.state() == "passed", output


@pytest.mark.long
def test_a_needed_run_is_a_dependency_and_its_failure_is_reported(slurm_cluster, tmp_path):
    path = write_suite(tmp_path, **{**SUITE, "max_concurrent": 2}, overrides={"needs": ["needed"]})
    (tmp_path / "needed").write_text((tmp_path / "tiny.yaml").read_text())
    env = environment(slurm_cluster.env, HETSTEP_TEST_FAILS="needed:1")
    status, output = sweep(f"sweep={path}", "id=x", "wait=true", *ON_SLURM, env=env, cwd=tmp_path)
    assert status == 0, output
    folder = tmp_path / "sweeps/some/x"
    assert sorted(submitted(folder)) == ["a-1", "a-1", "b-1", "b-1", "needed", "needed"]
    assert "RETRIED: done at try 2; before: did not start, because it needs needed to succeed (CANCELLED" in output
