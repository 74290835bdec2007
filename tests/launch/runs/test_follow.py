"""The follower's output, without a job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from launch.executors.executor import JobStatus
from launch.runs.failure_logs import failed_step
from launch.runs.follow import Follower, MetricsTail, _metrics_to_show, failure

RUNNING, FAILED = JobStatus("RUNNING"), JobStatus("FAILED", ended=True)
RAISED = {
    "rank": 1,
    "realm": "train",
    "host": "n1",
    "verb": "step",
    "phase": "",
    "message": "rank 1 (train): ValueError: no",
    "traceback": 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: no\n',
}


class Job:
    """A job with scripted states; the last one stays. A callable is called for a state; None means running."""

    start_time = None

    def __init__(self, *statuses: JobStatus | Callable[[], JobStatus | None], job_id: str = "17"):
        self.statuses, self.job_id = list(statuses), job_id

    def status(self, now: bool = False) -> JobStatus:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return status if isinstance(status, JobStatus) else status() or RUNNING

    def cancel(self, check: bool = True) -> None:
        raise AssertionError("nobody cancelled")

    def name(self) -> str:
        return f"Slurm job {self.job_id}"


@pytest.fixture
def console(tmp_path_factory) -> Console:
    with open("/dev/null", "w") as nowhere:
        yield Console(record=True, width=120, soft_wrap=True, highlight=False, file=nowhere)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr("launch.runs.follow.POLL_S", 0.0)
    monkeypatch.setattr("launch.runs.follow.SETTLE_S", 0.0)


def write_steps(run_dir: Path, *moments: float, **values) -> None:
    """Write one line per step, with the values in the last."""
    lines = [{"step": step, "time": moment} for step, moment in enumerate(moments, 1)]
    lines[-1] |= values
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_logs(run_dir: Path, *texts: str) -> Path:
    """Return the folder of an attempt with these rank logs."""
    folder = run_dir / "attempts/17-0"
    folder.mkdir(parents=True)
    (folder / "started").write_text("1.0\n")
    for rank, text in enumerate(texts):
        (folder / f"rank{rank:05d}.log").write_text(text)
    return folder


def fail(run_dir: Path, attempt: str, said: dict) -> None:
    (run_dir / f"attempts/{attempt}/failure.json").write_text(json.dumps(said))


@pytest.mark.parametrize("terminal", [True, False])
def test_from_waiting_to_done(tmp_path, console, terminal):
    console._force_terminal = terminal
    waiting = JobStatus("PENDING", "Resources")
    job = Job(waiting, waiting, RUNNING, JobStatus("COMPLETED", ended=True))
    (tmp_path / "done.json").write_text('{"step": 3}')
    assert Follower(tmp_path, job, 3, MetricsTail(tmp_path), console).follow()
    text = console.export_text()
    assert f"done: step 3, in {tmp_path}" in text
    if not terminal:
        assert text.count("Slurm job 17: PENDING (Resources)") == 1 and "Slurm job 17: RUNNING" in text


@pytest.mark.parametrize(
    ("steps", "shown"),
    [(30, ["step 2/30  left 0:04:12  Slurm job 17: RUNNING"]), (None, ["step 2  Slurm job 17: RUNNING"])],
    ids=["bounded", "to the end of its data"],
)
def test_the_live_view_shows_step_metrics_and_time_left(tmp_path, console, steps, shown):
    write_steps(tmp_path, 1.0, 10.0, **{"train/reward": 0.25, "time/rollout": None})
    follower = Follower(tmp_path, Job(RUNNING), steps, MetricsTail(tmp_path), console)
    follower._print_lines(RUNNING, follower.metrics.new_lines())
    assert console.export_text().splitlines()[-1].startswith(f"step 2{'/30' if steps else ''}  train/reward 0.25")
    console.print(follower._view(RUNNING))
    head, *_, metrics = console.export_text().splitlines()
    assert [head] == shown and metrics.split() == ["train/reward", "0.25"]


def test_a_failure_and_its_restart_are_shown_once_while_the_job_ends(tmp_path, console):
    first, second = write_logs(tmp_path, "", "", ""), tmp_path / "attempts/17-1"
    (first / "progress").write_text("2\n")

    def restarted() -> None:
        second.mkdir()
        (second / "started").write_text("2.0\n")

    def done() -> JobStatus:
        (tmp_path / "done.json").write_text('{"step": 3}')
        return JobStatus("COMPLETED", ended=True)

    looks = (
        lambda: fail(tmp_path, "17-0", RAISED),
        RUNNING,
        lambda: (first / "verdict").write_text("requeue: crashed with status 1, after checkpoint 2\n") and None,
        restarted,
        RUNNING,
        done,
    )
    assert Follower(tmp_path, Job(*looks), 3, MetricsTail(tmp_path), console).follow()
    lines = [each for each in console.export_text().splitlines() if not each.startswith("Slurm job 17: RUNNING")]
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


def test_a_run_that_left_in_time_but_is_not_requeued_shows_how_to_resume(tmp_path):
    folder = write_logs(tmp_path, "all well\n")
    (folder / "requeue").write_text("the time limit is near\n")
    (folder / "progress").write_text("2\n")
    (folder / "verdict").write_text("stop: the time limit is near; cluster.requeue.enabled is false\n")
    assert failure(tmp_path, Job(FAILED), JobStatus("FAILED", "NonZeroExitCode", ended=True)) == [
        "Slurm job 17 ended (FAILED (NonZeroExitCode)), but the run is not complete: there is no done.json",
        "attempt 17-0: the time limit is near; cluster.requeue.enabled is false",
        f"logs: {folder}",
        "there is a checkpoint of step 2: the same command continues from it",
    ]


def test_the_same_command_is_not_said_to_continue_a_run_whose_checkpoint_or_key_is_refused(tmp_path):
    folder = write_logs(tmp_path, "")
    (folder / "progress").write_text("2\n")
    continues = "there is a checkpoint of step 2: the same command continues from it"
    for message, is_said in (("rank 0 (train): RecipeError: checkpoint: a: got SHA-256 1", False), ("ValueError: no", True)):
        fail(tmp_path, "17-0", {**RAISED, "message": message})
        assert (continues in failure(tmp_path, Job(FAILED), FAILED)) == is_said


def test_a_failure_of_an_earlier_job_in_the_same_folder_is_not_shown(tmp_path):
    write_logs(tmp_path, "", "")
    fail(tmp_path, "17-0", RAISED)
    assert not any("ValueError" in each for each in failure(tmp_path, Job(FAILED, job_id="18"), FAILED))


def test_a_rank_that_did_not_raise_is_shown_with_the_end_of_its_log(tmp_path):
    folder = write_logs(tmp_path, "", "loading\nSegmentation fault\n")
    fail(tmp_path, "17-0", {**RAISED, "message": "died without an error message: rank 1", "traceback": ""})
    assert failure(tmp_path, Job(FAILED), FAILED)[1:5] == [
        "rank 1 (realm train, host n1, verb step): died without an error message: rank 1",
        f"the end of {folder}/rank00001.log:",
        "  loading",
        "  Segmentation fault",
    ]


def test_an_error_that_says_what_to_change_is_shown_without_its_traceback(tmp_path):
    write_logs(tmp_path, "", "long\n")
    fail(tmp_path, "17-0", {**RAISED, "message": "rank 1 (train): RecipeError: data.train.split: got tran"})
    shown = failure(tmp_path, Job(FAILED), FAILED)
    assert "rank 1 (realm train, host n1, verb step): rank 1 (train): RecipeError: data.train.split: got tran" in shown
    assert not any("Traceback" in line or "long" in line for line in shown)


def test_without_a_traceback_the_batch_log_is_shown(tmp_path):
    folder = write_logs(tmp_path, "all well\n", "all well\n")
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit/17_0_log.out").write_text("srun: error: n1: task 1: Killed\n")
    lines = failure(tmp_path, Job(FAILED), FAILED)
    assert lines[0] == "the run failed: Slurm job 17 is FAILED" and lines[-1] == f"logs: {folder}"
    assert "  srun: error: n1: task 1: Killed" in lines


@pytest.mark.parametrize(
    ("log", "attempt", "realm", "words"),
    [
        (("n1: task 1: Killed", "REQUEUE", "n2: task 0: Killed"), 2, None, ["n2: task 0: Killed"]),
        (("n1: task 1: Killed", "REQUEUE", "n2: task 0: Killed"), 1, None, ["n1: task 1: Killed"]),
        (("n1: task 1: Killed", "REQUEUE"), 2, None, []),
        (("ECHO", "TRAIN", "n2: task 1: Out Of Memory", "GENERATE"), 1, "generate", ["n2: task 1: Out Of Memory", "GENERATE"]),
        (("ECHO", "TRAIN", "n2: task 1: Out Of Memory", "GENERATE"), 1, None, ["ECHO", "TRAIN"]),
    ],
)
def test_sruns_lines_are_of_the_last_attempt_and_of_the_first_failed_rank(tmp_path, log, attempt, realm, words):
    known = {
        "REQUEUE": "requeue: crashed",
        "ECHO": "srun: error: n1: task 0: Exited with exit code 123",
        "TRAIN": "hetstep: the train component failed; task 0 of its step is rank 0",
        "GENERATE": "hetstep: the generate component failed; task 0 of its step is rank 2",
    }
    batch, *wanted = ([known.get(word, f"srun: error: {word}") for word in words] for words in (log, words))
    (tmp_path / "batch.out").write_text("\n".join([*batch, ""]))
    assert failed_step(tmp_path / "batch.out", attempt, realm) == wanted[0]


def test_a_job_that_slurm_has_forgotten_is_judged_by_its_folder(tmp_path, console):
    gone = JobStatus("GONE", ended=True)
    (tmp_path / "done.json").write_text('{"step": 3}')
    assert Follower(tmp_path, Job(gone), 3, MetricsTail(tmp_path), console).follow()
    (tmp_path / "done.json").unlink()
    write_logs(tmp_path, "")
    fail(tmp_path, "17-0", {"rank": 2, "realm": "train", "message": "no"})
    assert not Follower(tmp_path, Job(gone), 3, MetricsTail(tmp_path), console).follow()
    assert "rank 2 (realm train): no" in console.export_text()


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        ({"step": 1, "val/reward": 0.5, "time/step": 1.0}, ["val/reward", "time/step"]),
        ({"val/reward": 0.5, "val/accuracy": 0.5}, ["val/accuracy"]),
        ({"train/reward": 0.5, "train/broke_judge": 0.25, "train/env_failures": 0.0}, ["train/reward", "train/broke_judge"]),
        ({"train/env_failures": 1.0}, ["train/env_failures"]),
        ({"val/reward": 0.0, "val/broke_judge": 1.0, "val/env_failures": 0.0}, ["val/broke_judge", "val/reward"]),
    ],
)
def test_a_reward_with_an_accuracy_and_zero_failures_are_not_shown(step, shown):
    assert list(_metrics_to_show(step)) == shown


def test_an_evaluation_ends_with_all_answers(tmp_path, console):
    (tmp_path / "answers").mkdir()
    (tmp_path / "done.json").write_text('{"step": 0}')
    assert Follower(tmp_path, Job(JobStatus("COMPLETED", ended=True)), None, MetricsTail(tmp_path), console).follow()
    text = console.export_text()
    assert f"done: all answers, in {tmp_path}" in text and "step 0" not in text
