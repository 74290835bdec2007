"""A run that is asked to leave, or whose time is short, saves, leaves, and resumes by itself to the same result bit for bit.

On the local executor, whose controller does what the tail of a batch script does. Marked `full`: SIGUSR2. All else is
`make test-long`. By default: test_kill.py, tests/slurm/test_squashfuse.py and tests/test_deadline.py.
"""

import os
import signal
import time
from contextlib import contextmanager

import pytest

from launch.runs.attempts import all_attempts
from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, Fault, launch, left_alive, pids_of, printed, submit

NEVER = "checkpointing.save_period=1000"  # but at the end, and where a run is left
RESTARTS = "cluster.requeue.max_restarts=3"


def at_step(step: int, victim: int, number: int) -> Fault:
    """Rank 2 begins to decode once a step."""
    return Fault("decode", victim, actor=2, count=step, signal=number)


def resumed_from(attempt) -> str | None:
    lines = attempt.logs[0].read_text().splitlines()
    return next((line.rpartition("step_")[2] for line in lines if " resumed from " in line), None)


@pytest.mark.full
@pytest.mark.parametrize(
    "number", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=lambda number: number.name
)
def test_a_signal_ends_the_attempt_after_the_step(tmp_path, uninterrupted, number):
    """It comes in step 3 of 4; the second attempt does the fourth."""
    run = submit(tmp_path / "run", *LOCAL, NEVER, fault=at_step(3, 0, number))
    assert run.status == 0, run.output
    assert run.verdicts() == [f"requeue: {number.name} came", "done"]
    first, second = all_attempts(run.folder)
    assert (first.folder / "progress").read_text() == "3\n" and resumed_from(second) == "000003"
    assert len(first.logs) == len(second.logs) == 4 and "leaving: " in first.logs[0].read_text()
    assert first.failure is None and second.failure is None
    assert run.metrics() == uninterrupted
    assert left_alive(run.folder) == []


@pytest.mark.long
def test_a_signal_during_start_ends_the_attempt_before_the_first_step(tmp_path):
    """Each start gets the signal while it loads: twice in a row ends the run."""
    run = submit(tmp_path / "run", *LOCAL, fault=Fault("load data", 0, actor=0, count=1, signal=signal.SIGUSR2))
    assert run.status == 1
    first, second = run.verdicts()
    assert first == "requeue: SIGUSR2 came" and second.startswith("stop: two starts in a row")
    assert read(run.folder / "metrics.jsonl") == []
    assert "checkpointing.save_period" in run.output, run.output


@pytest.mark.long
def test_must_save_by(tmp_path, uninterrupted):
    """The deadline is over before the first step, so each attempt does one step."""
    run = submit(tmp_path / "run", *LOCAL, NEVER, "checkpointing.checkpoint_must_save_by='0:0:0:1'")
    assert run.status == 0, run.output
    *left, last = run.verdicts()
    assert len(left) == 3 and last == "done"
    assert all(verdict.startswith("requeue: checkpointing.checkpoint_must_save_by is over: ") for verdict in left)
    assert run.metrics() == uninterrupted


@contextmanager
def endless(folder, *overrides, **more):
    """Start an endless run, which is cancelled after the block."""
    process = launch(folder, *LOCAL, NEVER, "grpo.max_num_steps=1000000", *overrides, **more)

    def wait_until(condition):
        while not (value := condition()):
            assert process.poll() is None, printed(folder)
            time.sleep(0.2)
        return value

    try:
        yield wait_until
    finally:
        process.terminate()
        process.wait()


def second_attempt(folder):
    """Wait for both attempts, the second one after it has resumed."""
    attempts = all_attempts(folder)
    return attempts[:2] if len(attempts) > 1 and resumed_from(attempts[1]) else None


@pytest.mark.long
def test_the_ranks_leave_before_the_time_limit_and_go_on_in_a_new_allocation(tmp_path):
    folder = tmp_path / "run"
    with endless(folder, "cluster.time_min=1") as wait_until:
        first, second = wait_until(lambda: second_attempt(folder))
    assert first.verdict.startswith("requeue: the allocation ends in ")
    assert (first.folder / "verdict").stat().st_mtime < first.started + 60
    assert int(resumed_from(second)) == int((first.folder / "progress").read_text()) > 3
    assert first.failure is None


@pytest.mark.long
def test_every_rank_gets_the_signal(tmp_path, uninterrupted):
    """Slurm's preemption does so: rank 0 alone decides, the others continue to the end of the step."""
    folder = tmp_path / "run"
    with endless(folder, fault=Fault("never", victim=0)) as wait_until:
        wait_until(lambda: len(read(folder / "metrics.jsonl")) >= 2)
        for path in pids_of(folder).glob("[0-9]*"):
            os.kill(int(path.read_text()), signal.SIGTERM)
        first, second = wait_until(lambda: second_attempt(folder))
    assert first.verdict == "requeue: SIGTERM came" and first.failure is None
    assert int(resumed_from(second)) == int((first.folder / "progress").read_text())
    lines = [line for line in read(folder / "metrics.jsonl") if line["step"] <= 2]
    assert [line["train/loss"] for line in lines] == [line["train/loss"] for line in uninterrupted[:2]]


@pytest.mark.long
def test_a_crash_is_restarted_as_long_as_there_is_progress_and_a_budget(tmp_path, uninterrupted):
    """Killed at its second step, each attempt has done one: with two restarts step 3 is not passed."""
    fault = at_step(2, 1, signal.SIGKILL)
    run = submit(tmp_path / "run", *LOCAL, "cluster.requeue.max_restarts=2", fault=fault)
    assert run.status == 1 and len(run.verdicts()) == 3
    assert run.verdicts()[-1].startswith("stop: crashed with status ")
    assert "2 crashes were restarted before (cluster.requeue.max_restarts: 2)" in run.output, run.output
    assert left_alive(run.folder) == []
    rerun = submit(run.folder, *LOCAL, fault=fault)  # a fresh budget, of which it needs nothing: one step is left
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == uninterrupted


@pytest.mark.long
def test_a_crash_without_progress_is_the_end(tmp_path):
    run = submit(tmp_path / "run", *LOCAL, NEVER, RESTARTS, fault=at_step(2, 3, signal.SIGKILL))
    assert run.status == 1
    (verdict,) = run.verdicts()
    assert verdict.startswith("stop: crashed with status ") and "without a new checkpoint" in run.output
    assert left_alive(run.folder) == []


@pytest.mark.long
def test_without_checkpoints_a_signal_ends_the_run_and_reports_the_loss(tmp_path):
    run = submit(tmp_path / "run", *LOCAL, RESTARTS, "checkpointing.enabled=false", fault=at_step(3, 0, signal.SIGUSR2))
    assert run.status == 1 and len(run.verdicts()) == 1
    assert "SIGUSR2 came: the run ends without having saved anything" in run.failure()["message"]
    assert "checkpointing.enabled is false" in run.output
