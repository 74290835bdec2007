"""What the follower reads and shows, without a job."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from launch.executors.base import JobStatus
from launch.follow import Follower, Metrics, _shown, failure
from launch.last_words import failed_step


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
        assert "Slurm job 17: RUNNING" in text


def test_the_live_view_shows_step_metrics_and_time_left(tmp_path):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    follower = Follower(tmp_path, Job(JobStatus("RUNNING")), 30, Metrics(tmp_path), console)
    (tmp_path / "metrics.jsonl").write_text(line(1, 1.0) + line(2, 10.0, **{"train/reward": 0.25, "time/rollout": None}))
    follower.metrics.new_lines()
    console.print(follower._view(JobStatus("RUNNING")))
    text = console.export_text()
    assert "step 2/30  left 0:04:12" in text
    assert "train/reward  0.25" in text and "time/rollout" not in text


def test_of_a_run_that_its_data_end_nobody_knows_how_far_it_is(tmp_path):
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    (tmp_path / "metrics.jsonl").write_text(line(1, 1.0) + line(2, 10.0, **{"train/reward": 0.25}))
    follower = Follower(tmp_path, Job(JobStatus("RUNNING")), None, Metrics(tmp_path), console)
    follower._print_lines(JobStatus("RUNNING"), follower.metrics.new_lines())
    console.print(follower._view(JobStatus("RUNNING")))
    assert console.export_text().splitlines() == [
        "step 1",
        "step 2  train/reward 0.25",
        "step 2  Slurm job 17: RUNNING",
        "train/reward  0.25",
    ]


def write_logs(run_dir: Path, *texts: str) -> None:
    folder = run_dir / "attempts/17-0"
    folder.mkdir(parents=True)
    (folder / "started").write_text("1.0\n")
    for rank, text in enumerate(texts):
        (folder / f"rank{rank:05d}.log").write_text(text)


def fail(run_dir: Path, attempt: str, said: dict) -> None:
    (run_dir / f"attempts/{attempt}/failure.json").write_text(json.dumps(said))


def follow(run_dir: Path, *looks) -> str:
    """What is shown by a follower that finds, at each look at the job, what the callable has left by then."""
    job = Job(JobStatus("RUNNING"))
    left = iter(looks)

    def status(now: bool = False) -> JobStatus:
        return next(left)() or JobStatus("RUNNING")

    job.status = status
    console = Console(record=True, soft_wrap=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115 ends with it
    Follower(run_dir, job, 3, Metrics(run_dir), console).follow()
    return console.export_text()


RAISED = {
    "rank": 1,
    "realm": "train",
    "host": "n1",
    "verb": "step",
    "phase": "",
    "message": "rank 1 (train): ValueError: no",
    "traceback": 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: no\n',
}


def test_a_failure_is_shown_once_while_the_job_still_ends_and_so_is_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.follow.POLL_S", 0.0)
    first, second = tmp_path / "attempts/17-0", tmp_path / "attempts/17-1"

    def restarted() -> None:
        second.mkdir()
        (second / "started").write_text("2.0\n")

    def done() -> JobStatus:
        (tmp_path / "done.json").write_text('{"step": 3}')
        return JobStatus("COMPLETED", ended=True)

    write_logs(tmp_path, "", "", "")
    (first / "progress").write_text("2\n")
    text = follow(
        tmp_path,
        lambda: fail(tmp_path, "17-0", RAISED),
        lambda: None,
        lambda: (first / "verdict").write_text("requeue: crashed with status 1, after checkpoint 2\n") and None,
        restarted,
        lambda: None,
        done,
    )
    lines = [each for each in text.splitlines() if not each.startswith("Slurm job 17: RUNNING")]
    assert lines == [
        "rank 1 (realm train, host n1, verb step): rank 1 (train): ValueError: no",
        "  Traceback (most recent call last):",
        '    File "x.py", line 1, in <module>',
        "  ValueError: no",
        f"2 other ranks ended with it; logs: {first}",
        "attempt 17-0 ended; requeue: crashed with status 1, after checkpoint 2",
        "attempt 17-1: all ranks start again, from step 2",
        f"done: step 3, in {tmp_path}",
    ]


def test_a_run_that_left_in_time_but_is_not_requeued_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.follow.SETTLE_S", 0.0)
    write_logs(tmp_path, "all well\n")
    folder = tmp_path / "attempts/17-0"
    (folder / "requeue").write_text("the time limit is near\n")
    (folder / "progress").write_text("2\n")
    (folder / "verdict").write_text("stop: the time limit is near; cluster.requeue.enabled is false\n")
    lines = failure(tmp_path, Job(JobStatus("FAILED")), JobStatus("FAILED", "NonZeroExitCode", ended=True))
    assert lines == [
        "Slurm job 17 ended (FAILED (NonZeroExitCode)), but the run is not complete: there is no done.json",
        "attempt 17-0: the time limit is near; cluster.requeue.enabled is false",
        f"logs: {folder}",
        "there is a checkpoint of step 2: the same command goes on from it",
    ]


def test_a_failure_of_an_earlier_job_in_the_same_folder_is_not_shown(tmp_path):
    write_logs(tmp_path, "", "")
    fail(tmp_path, "17-0", RAISED)
    cancelled = Job(JobStatus("CANCELLED", ended=True))
    cancelled.job_id = "18"
    assert not any("ValueError" in each for each in failure(tmp_path, cancelled, cancelled.status()))


def test_a_rank_that_did_not_raise_is_shown_with_its_last_words(tmp_path):
    write_logs(tmp_path, "", "loading\nSegmentation fault\n")
    fail(tmp_path, "17-0", {**RAISED, "message": "died without a word: rank 1", "traceback": ""})
    lines = failure(tmp_path, Job(JobStatus("FAILED")), JobStatus("FAILED", ended=True))
    assert lines[1:5] == [
        "rank 1 (realm train, host n1, verb step): died without a word: rank 1",
        f"the end of {tmp_path}/attempts/17-0/rank00001.log:",
        "  loading",
        "  Segmentation fault",
    ]


def test_srun_s_words_are_those_of_the_last_attempt(tmp_path):
    log = tmp_path / "batch.out"
    log.write_text("srun: error: n1: task 1: Killed\nrequeue: crashed\nsrun: error: n2: task 0: Killed\n")
    assert failed_step(log, 2) == ["srun: error: n2: task 0: Killed"]
    assert failed_step(log, 1) == ["srun: error: n1: task 1: Killed"]
    log.write_text("srun: error: n1: task 1: Killed\nrequeue: crashed\n")
    assert failed_step(log, 2) == []


def test_srun_s_words_are_left_out_where_they_are_of_a_rank_that_ended_with_another(tmp_path):
    log = tmp_path / "batch.out"
    echo = "srun: error: n1: task 0: Exited with exit code 123"
    train = "hetstep: the train component failed; task 0 of its step is rank 0"
    killed = "srun: error: n2: task 1: Out Of Memory"
    generate = "hetstep: the generate component failed; task 0 of its step is rank 2"
    log.write_text("\n".join([echo, train, killed, generate, ""]))
    assert failed_step(log, 1, "generate") == [killed, generate]
    assert failed_step(log, 1) == [echo, train]


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
    fail(tmp_path, "17-0", {"rank": 2, "realm": "train", "message": "no"})
    assert not Follower(tmp_path, Job(gone), 3, Metrics(tmp_path), console).follow()
    assert "rank 2 (realm train): no" in console.export_text()


def test_a_reward_of_validation_is_shown_where_there_is_no_accuracy():
    assert list(_shown({"step": 1, "val/reward": 0.5, "time/step": 1.0})) == ["val/reward", "time/step"]
    assert list(_shown({"val/reward": 0.5, "val/accuracy": 0.5})) == ["val/accuracy"]


def test_answers_that_could_not_be_judged_are_shown_where_there_are_some():
    step = {"train/reward": 0.5, "train/broke_judge": 0.25, "train/env_failures": 0.0}
    assert _shown(step) == {"train/reward": 0.5, "train/broke_judge": 0.25}
    assert "train/env_failures" in _shown(step | {"train/env_failures": 1.0})
