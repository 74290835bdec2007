"""launch/executors/verdict.sh over run folders as attempts leave them: the next action, and its exit status."""

import os
import subprocess
from pathlib import Path

import pytest

from launch.executors.executor import ROOT
from launch.runs.attempts import AttemptFolder
from pipeline.job.attempt import Attempt
from pipeline.job.watchdog import Failure

DONE, REQUEUE = 0, 75
ONE = {"max_restarts": 1}


def left_by(
    run_dir: Path, name: str, *, progress: int | None = None, requeue: str = "", verdict: str = "", **files: str
) -> Attempt:
    """Make an attempt's folder."""
    attempt = Attempt(run_dir / "attempts" / name)
    attempt.folder.mkdir(parents=True)
    if progress is not None:
        attempt.record_progress(progress)
    if requeue:
        attempt.ask_requeue(requeue)
    for file, text in {"verdict": verdict, **files}.items():
        if text:
            (attempt.folder / file.replace("failure", "failure.json")).write_text(text + "\n")
    return attempt


def judge(run_dir: Path, name: str, status: int, max_restarts: int = 3, requeue: bool = True) -> tuple[int, str]:
    """Return (exit status, verdict), as printed and as `launch.runs.attempts` reads it."""
    command = [ROOT / "launch/executors/verdict.sh", run_dir, name, str(status), str(max_restarts), str(requeue).lower()]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HETSTEP_SETTLE_S": "0"})
    assert ended.stderr == ""
    verdict = ended.stdout.strip()
    assert verdict == AttemptFolder(run_dir / "attempts" / name, 0.0).verdict
    return ended.returncode, verdict


WAITED = {"requeue": "SIGUSR2"}
LEFT = {"requeue": "the allocation ends in 50 s", "progress": 4}
BAD = {"bad_nodes": "n3: 7 GPUs, not 8"}
CRASHED = {"progress": 1, "verdict": "requeue: crashed"}


@pytest.mark.parametrize(
    ("attempts", "status", "limits", "code", "verdict"),
    [
        # ranks that left on purpose; Slurm's preemption may end an srun whose tasks all end with 0
        ({"17-0": LEFT}, 0, {}, REQUEUE, "requeue: the allocation ends in 50 s"),
        ({"17-0": LEFT}, 143, {}, REQUEUE, "requeue: the allocation ends in 50 s"),
        ({"17-0": LEFT}, 0, {"requeue": False}, 1, "stop: the allocation ends in 50 s; cluster.requeue.enabled is false"),
        (
            {**{f"17-{i}": LEFT | {"verdict": "requeue: it"} for i in range(5)}, "17-5": {"progress": 6}},
            1,
            ONE,
            REQUEUE,
            "requeue: ",
        ),
        # once without a checkpoint is forgiven, twice in a row is not; numbers are not in the order of the alphabet
        ({"17-9": LEFT, "17-10": WAITED}, 0, {}, REQUEUE, "requeue: SIGUSR2"),
        (
            {"17-9": LEFT, "17-10": WAITED, "17-12": WAITED},
            0,
            {},
            1,
            "stop: two starts in a row were left without a new checkpoint",
        ),
        # crashes
        (
            {"17-0": LEFT | {"failure": '{"rank": 3}'}},
            1,
            {},
            REQUEUE,
            "requeue: crashed with status 1, after checkpoint 4; restart 1 of 3",
        ),
        ({"17-0": {}}, 137, {}, 137, "stop: crashed with status 137, without a new checkpoint since its start"),
        ({"17-0": {}}, 0, {}, 1, "stop: "),
        ({"17-0": {}}, 75, {}, 1, "stop: "),
        ({"17-0": {"progress": 1}}, 9, {"requeue": False}, 9, "stop: crashed with status 9; cluster.requeue.enabled is false"),
        ({"17-0": {"progress": 1}}, 9, {"max_restarts": 0}, 9, "stop: crashed with status 9"),
        (
            {"17-0": CRASHED, "17-1": {"progress": 5}},
            1,
            ONE,
            1,
            "stop: crashed with status 1, and 1 crashes were restarted before",
        ),
        # another submission, whose number only begins alike, has a budget of its own
        ({**dict.fromkeys(("17-0", "171-0", "local-18-0"), CRASHED), "18-0": {"progress": 2}}, 1, ONE, REQUEUE, "requeue: "),
        # bad nodes need no progress, but count
        (
            {"17-0": BAD},
            1,
            ONE,
            REQUEUE,
            "requeue: nodes failed their checks (n3: 7 GPUs, not 8), after checkpoint none; restart 1 of 1",
        ),
        ({"17-0": BAD | {"verdict": "requeue: nodes failed"}, "17-1": BAD}, 1, ONE, 1, "stop: "),
    ],
)
def test_the_last_attempt_is_judged(tmp_path, attempts, status, limits, code, verdict):
    run_dir = tmp_path / "my run"
    for name, left in attempts.items():
        left_by(run_dir, name, **left)
    judged = judge(run_dir, name, status, **limits)
    assert judged[0] == code and judged[1].startswith(verdict)


@pytest.mark.parametrize("status", [0, 137])  # a teardown may fail after the run is complete
def test_a_complete_run_is_done(tmp_path, status):
    left_by(tmp_path, "17-0", progress=4)
    (tmp_path / "done.json").write_text('{"step": 4}')
    assert judge(tmp_path, "17-0", status) == (DONE, "done")


@pytest.mark.parametrize("why", ["", "SIGTERM"])
def test_an_attempt_that_another_job_has_superseded_is_the_last_of_its_own(tmp_path, why):
    left_by(tmp_path, "18-0", started="1000.5").claim()
    mine = left_by(tmp_path, "17-0", progress=4, requeue=why, started="1000.25")
    assert judge(tmp_path, "17-0", 1) == (1, "stop: attempt 18-0, of another job, has taken the run over")
    mine.claim()
    assert judge(tmp_path, "17-0", 1)[0] == REQUEUE


def test_an_attempt_that_fails_before_it_claims_the_folder_is_not_superseded(tmp_path):
    left_by(tmp_path, "17-3", started="1000.125").claim()
    left_by(tmp_path, "18-0", bad_nodes="n3: 7 GPUs, not 8", started="1000.25")
    assert judge(tmp_path, "18-0", 1)[0] == REQUEUE


def test_the_budget_of_crashes(tmp_path):
    for restart in range(3):
        left_by(tmp_path, f"local-5-{restart}", progress=restart + 1)
        status, verdict = judge(tmp_path, f"local-5-{restart}", 137, max_restarts=2)
        assert (status == REQUEUE) == (restart < 2), verdict
    assert status == 137
    assert verdict == ("stop: crashed with status 137, and 2 crashes were restarted before (cluster.requeue.max_restarts: 2)")


def test_a_run_stops_if_its_verdict_cannot_be_written(tmp_path):
    left_by(tmp_path, "17-0", progress=4).folder.joinpath("verdict").mkdir()
    (tmp_path / "attempts/17-0/verdict/in the way").touch()
    command = [ROOT / "launch/executors/verdict.sh", tmp_path, "17-0", "1", "3", "true"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout.startswith("stop: the verdict cannot be written")


@pytest.mark.parametrize(("status", "crashed"), [(123, "crashed"), (124, "crashed"), (1, "crashed with status 1")])
def test_the_rank_of_failure_json_is_named_instead_of_a_rank_it_ended(tmp_path, status, crashed):
    first = Failure(2, "generate", "node7", "rollout", "decode", 'ValueError: {"rank": 9, "realm": "train"}')
    attempt = left_by(tmp_path, "17-0")
    assert first.record(attempt.folder)
    expected = f"stop: {crashed}: rank 2 (generate) failed first, without a new checkpoint since its start"
    assert judge(tmp_path, "17-0", status) == (status, expected)
