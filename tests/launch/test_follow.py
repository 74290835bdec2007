"""What the follower reads and shows, without a job."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from launch.follow import Follower, Metrics, failure
from launch.job import JobStatus


class Job:
    """A job whose states are told beforehand."""

    job_id = "17"
    start_time = None

    def __init__(self, *statuses: JobStatus):
        self.statuses = list(statuses)

    def status(self, now: bool = False) -> JobStatus:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def cancel(self, check: bool = True) -> None:
        raise AssertionError("nobody cancelled")

    def name(self) -> str:
        return "Slurm job 17"


def line(step: int, time: float, **values) -> str:
    return json.dumps({"step": step, "time": time, **values}) + "\n"


def test_lines_are_read_once_and_only_when_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    assert metrics.new_lines() == []
    path.write_text(line(1, 10.0) + line(2, 20.0)[:9])
    assert [each["step"] for each in metrics.new_lines()] == [1]
    path.write_text(line(1, 10.0) + line(2, 20.0))
    assert [each["step"] for each in metrics.new_lines()] == [2]
    assert metrics.new_lines() == []


def test_a_resumed_run_writes_its_steps_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 10.0) + line(2, 20.0) + line(3, 30.0))
    metrics = Metrics(tmp_path)
    metrics.new_lines()
    beside = tmp_path / "new"
    beside.write_text(line(1, 10.0) + line(2, 99.0) + line(3, 101.0) + line(4, 103.0))
    beside.replace(path)
    assert [each["time"] for each in metrics.new_lines()] == [99.0, 101.0, 103.0]
    assert metrics.step == 4


def test_time_left_is_at_the_recent_pace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(1, 100.0) + line(2, 110.0) + line(3, 120.0))
    metrics = Metrics(tmp_path)
    assert metrics.seconds_left(10) is None
    metrics.new_lines()
    assert metrics.seconds_left(10) == 70.0


@pytest.mark.parametrize("terminal", [True, False])
def test_from_waiting_to_done(tmp_path, terminal):
    done = JobStatus("COMPLETED", ended=True)
    job = Job(JobStatus("PENDING", "Resources"), JobStatus("PENDING", "Resources"), JobStatus("RUNNING"), done)
    console = Console(record=True, force_terminal=terminal, width=120, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    follower = Follower(tmp_path, job, 3, Metrics(tmp_path), console)
    (tmp_path / "done.json").write_text('{"step": 3}')
    assert follower.follow()
    text = console.export_text()
    assert f"done: step 3, in {tmp_path}" in text
    if not terminal:
        assert text.count("Slurm job 17: PENDING (Resources)") == 1
        assert "Slurm job 17: RUNNING: the ranks are starting, no step yet" in text


def test_the_live_view_shows_step_metrics_and_time_left(tmp_path):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    follower = Follower(tmp_path, Job(JobStatus("RUNNING")), 30, Metrics(tmp_path), console)
    (tmp_path / "metrics.jsonl").write_text(line(1, 1.0) + line(2, 10.0, **{"train/reward": 0.25, "time/rollout": None}))
    follower.metrics.new_lines()
    console.print(follower._view(JobStatus("RUNNING")))
    text = console.export_text()
    assert "step 2/30  left 0:04:12" in text
    assert "train/reward  0.25" in text and "time/rollout" not in text


def write_logs(run_dir: Path, *texts: str) -> None:
    folder = run_dir / "attempts/17-0"
    folder.mkdir(parents=True)
    (folder / "started").write_text("1.0\n")
    for rank, text in enumerate(texts):
        (folder / f"rank{rank:05d}.log").write_text(text)


def test_without_a_traceback_the_batch_log_is_shown(tmp_path):
    write_logs(tmp_path, "all well\n", "all well\n")
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit/17_0_log.out").write_text("srun: error: n1: task 1: Killed\n")
    lines = failure(tmp_path, Job(JobStatus("FAILED")), JobStatus("FAILED", "NonZeroExitCode", ended=True))
    assert lines[0] == "the run failed: Slurm job 17 is FAILED (NonZeroExitCode)"
    assert "  srun: error: n1: task 1: Killed" in lines
    assert lines[-1] == f"logs: {tmp_path}/attempts/17-0"


def test_a_job_that_slurm_has_forgotten_is_judged_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.follow.SETTLE_S", 0.0)
    gone = JobStatus("GONE", ended=True)
    console = Console(record=True, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    (tmp_path / "done.json").write_text('{"step": 3}')
    assert Follower(tmp_path, Job(gone), 3, Metrics(tmp_path), console).follow()
    (tmp_path / "done.json").unlink()
    write_logs(tmp_path, "")
    (tmp_path / "attempts/17-0/failure.json").write_text(json.dumps({"rank": 2, "realm": "train", "message": "no"}))
    assert not Follower(tmp_path, Job(gone), 3, Metrics(tmp_path), console).follow()
    assert "rank 2 (realm train): no" in console.export_text()
