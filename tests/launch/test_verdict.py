"""launch/executors/verdict.sh over run folders as attempts leave them: what comes next, and the status that says so."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.attempts import PastAttempt
from launch.executors.base import ROOT
from pipeline.attempt import Attempt
from pipeline.watchdog import Failure

DONE, REQUEUE = 0, 75


def left_by(
    run_dir: Path, name: str, *, progress: int | None = None, requeue: str = "", verdict: str = "", **files: str
) -> Attempt:
    """An attempt's folder."""
    attempt = Attempt(run_dir / "attempts" / name)
    attempt.folder.mkdir(parents=True)
    if progress is not None:
        attempt.progressed(progress)
    if requeue:
        attempt.ask_requeue(requeue)
    for file, text in {"verdict": verdict, **files}.items():
        if text:
            (attempt.folder / file.replace("failure", "failure.json")).write_text(text + "\n")
    return attempt


def judge(run_dir: Path, name: str, status: int, max_restarts: int = 3, requeue: bool = True) -> tuple[int, str]:
    """(exit status, verdict), as printed and as `launch.attempts` reads it."""
    command = [ROOT / "launch/executors/verdict.sh", run_dir, name, str(status), str(max_restarts), str(requeue).lower()]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HETSTEP_SETTLE_S": "0"})
    assert ended.stderr == ""
    verdict = ended.stdout.strip()
    assert verdict == PastAttempt(run_dir / "attempts" / name, 0.0).verdict
    return ended.returncode, verdict


@pytest.mark.parametrize("status", [0, 137])  # a teardown may fail after the run is complete
def test_a_complete_run_is_done(tmp_path, status):
    left_by(tmp_path, "17-0", progress=4)
    (tmp_path / "done.json").write_text('{"step": 4}')
    assert judge(tmp_path, "17-0", status) == (DONE, "done")


@pytest.mark.parametrize("status", [0, 143])  # Slurm's preemption may end an srun whose tasks all end with 0
def test_ranks_that_left_on_purpose_are_started_again(tmp_path, status):
    left_by(tmp_path, "17-0", progress=4, requeue="the allocation ends in 50 s")
    assert judge(tmp_path, "17-0", status) == (REQUEUE, "requeue: the allocation ends in 50 s")


def test_not_if_the_recipe_says_so(tmp_path):
    left_by(tmp_path, "17-0", progress=4, requeue="SIGUSR2")
    assert judge(tmp_path, "17-0", 0, requeue=False) == (1, "stop: SIGUSR2; cluster.requeue.enabled is false")


@pytest.mark.parametrize("why", ["", "SIGTERM"])
def test_an_attempt_that_another_job_has_superseded_is_the_last_of_its_own(tmp_path, why):
    left_by(tmp_path, "18-0", started="1000.5").claim()
    mine = left_by(tmp_path, "17-0", progress=4, requeue=why, started="1000.25")
    assert judge(tmp_path, "17-0", 1) == (1, "stop: attempt 18-0, of another job, has taken the run over")
    mine.claim()
    assert judge(tmp_path, "17-0", 1)[0] == REQUEUE


def test_one_that_fails_before_it_claims_the_folder_is_not_superseded(tmp_path):
    left_by(tmp_path, "17-3", started="1000.125").claim()
    left_by(tmp_path, "18-0", bad_nodes="n3: 7 GPUs, not 8", started="1000.25")
    assert judge(tmp_path, "18-0", 1)[0] == REQUEUE


def test_leaving_does_not_count_as_a_crash(tmp_path):
    for restart in range(5):
        left_by(tmp_path, f"17-{restart}", progress=restart + 1, requeue="SIGTERM", verdict="requeue: SIGTERM")
    left_by(tmp_path, "17-5", progress=6)
    assert judge(tmp_path, "17-5", 1, max_restarts=1)[0] == REQUEUE


def test_leaving_once_without_a_checkpoint_is_forgiven_twice_in_a_row_is_not(tmp_path):
    left_by(tmp_path, "17-0", progress=4, requeue="SIGUSR2")
    left_by(tmp_path, "17-1", requeue="SIGUSR2")
    assert judge(tmp_path, "17-1", 0) == (REQUEUE, "requeue: SIGUSR2")
    left_by(tmp_path, "17-2", requeue="SIGUSR2")
    status, verdict = judge(tmp_path, "17-2", 0)
    assert status == 1 and verdict.startswith("stop: two starts in a row were left without a new checkpoint (SIGUSR2)")
    assert "cluster.time_min" in verdict and "checkpointing.save_period" in verdict


def test_the_attempt_before_is_the_one_with_the_next_lower_number(tmp_path):
    """Not 9 after 10 by the alphabet, and Slurm may count a start that never came to have a folder."""
    left_by(tmp_path, "17-9", progress=4, requeue="SIGUSR2")
    left_by(tmp_path, "17-10", requeue="SIGUSR2")
    left_by(tmp_path, "17-12", requeue="SIGUSR2")
    assert judge(tmp_path, "17-12", 0)[0] == 1
    assert judge(tmp_path, "17-10", 0)[0] == REQUEUE


def test_a_rank_that_failed_while_the_others_left_is_a_crash(tmp_path):
    left_by(tmp_path, "17-0", progress=4, requeue="SIGTERM", failure='{"rank": 3}')
    assert judge(tmp_path, "17-0", 1) == (REQUEUE, "requeue: crashed with status 1, after checkpoint 4; restart 1 of 3")


def test_a_crash_without_progress_ends_the_run(tmp_path):
    left_by(tmp_path, "17-0")
    assert judge(tmp_path, "17-0", 137) == (137, "stop: crashed with status 137, without a new checkpoint since its start")


def test_the_budget_of_crashes(tmp_path):
    for restart in range(3):
        left_by(tmp_path, f"local-5-{restart}", progress=restart + 1)
        status, verdict = judge(tmp_path, f"local-5-{restart}", 137, max_restarts=2)
        assert (status == REQUEUE) == (restart < 2), verdict
    assert status == 137
    assert verdict == ("stop: crashed with status 137, and 2 crashes were restarted before (cluster.requeue.max_restarts: 2)")


def test_a_resubmission_has_a_fresh_budget(tmp_path):
    left_by(tmp_path, "17-0", progress=1, verdict="requeue: crashed")
    left_by(tmp_path, "171-0", progress=1, verdict="requeue: crashed")
    left_by(tmp_path, "local-18-0", progress=1, verdict="requeue: crashed")
    left_by(tmp_path, "18-0", progress=2)
    assert judge(tmp_path, "18-0", 1, max_restarts=1)[0] == REQUEUE


def test_no_restart_where_none_is_wanted(tmp_path):
    left_by(tmp_path, "17-0", progress=1)
    assert judge(tmp_path, "17-0", 9, requeue=False)[1].endswith("; cluster.requeue.enabled is false")
    assert judge(tmp_path, "17-0", 9, max_restarts=0)[0] == 9


def test_bad_nodes_are_a_crash_that_needs_no_progress_but_a_budget(tmp_path):
    bad = "n3: 7 GPUs, not 8"
    left_by(tmp_path, "17-0", bad_nodes=bad)
    assert judge(tmp_path, "17-0", 1, max_restarts=1) == (
        REQUEUE,
        "requeue: nodes failed their checks (n3: 7 GPUs, not 8), after checkpoint none; restart 1 of 1",
    )
    left_by(tmp_path, "17-1", bad_nodes=bad)
    assert judge(tmp_path, "17-1", 1, max_restarts=1)[0] == 1


@pytest.mark.parametrize("status", [0, 75])
def test_a_stop_never_exits_as_if_it_were_done_or_a_requeue(tmp_path, status):
    left_by(tmp_path, "17-0")
    code, verdict = judge(tmp_path, "17-0", status)
    assert code == 1 and verdict.startswith("stop: ")


def test_a_run_dir_with_spaces(tmp_path):
    left_by(tmp_path / "my run", "17-0", progress=4)
    left_by(tmp_path / "my run", "17-1", progress=5)
    assert judge(tmp_path / "my run", "17-0", 1)[0] == REQUEUE
    assert judge(tmp_path / "my run", "17-1", 1, max_restarts=1)[0] == 1


def test_what_cannot_be_written_cannot_be_counted(tmp_path):
    left_by(tmp_path, "17-0", progress=4).folder.joinpath("verdict").mkdir()
    (tmp_path / "attempts/17-0/verdict/in the way").touch()
    command = [ROOT / "launch/executors/verdict.sh", tmp_path, "17-0", "1", "3", "true"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout.startswith("stop: the verdict cannot be written")


@pytest.mark.parametrize(("status", "crashed"), [(123, "crashed"), (124, "crashed"), (1, "crashed with status 1")])
def test_the_rank_of_failure_json_is_named_instead_of_one_that_ended_with_it(tmp_path, status, crashed):
    first = Failure(2, "generate", "node7", "rollout", "decode", 'ValueError: {"rank": 9, "realm": "train"}')
    attempt = left_by(tmp_path, "17-0")
    assert first.record(attempt.folder)
    expected = f"stop: {crashed}: rank 2 (generate) failed first, without a new checkpoint since its start"
    assert judge(tmp_path, "17-0", status) == (status, expected)
