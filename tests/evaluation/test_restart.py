"""An evaluation that is killed at any moment continues to the scores of an uninterrupted one, and asks nothing twice."""

import json
import os
import signal

import pytest

from launch.executors.record import read_record
from tests.end_to_end.runs import LOCAL, Fault, Run, launch, left_alive, pids_of, submit
from tests.evaluation.evaluations import ANSWERS, judged, kept, overrides, scores
from tests.launch.waiting import wait_until

pytestmark = pytest.mark.full


@pytest.fixture(scope="session")
def whole(made_once) -> Run:
    """Return an evaluation that nothing happened to."""

    def make(folder):
        run = submit(folder / "run", *LOCAL, *overrides(folder))
        assert run.status == 0, run.output

    folder = made_once("evaluation", make) / "run"
    return Run(folder, 0, "", 0.0)


def continues(folder, whole, *more):
    """Run the command again, and check that it asks what was missing and nothing else."""
    before, told = kept(folder / "run"), judged(folder)
    assert 0 < sum(map(len, before.values())) < sum(ANSWERS.values())
    rerun = submit(folder / "run", *LOCAL, *overrides(folder), *more)
    assert scores(rerun) == scores(whole)
    assert kept(rerun.folder) == kept(whole.folder)
    assert judged(folder) - told == ANSWERS["sampled"] - len(before["sampled"])
    return before


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("phase", "count"), [("decode", 4), ("likelihoods", 3)])
def test_a_killed_rank(tmp_path, whole, victim, phase, count):
    fault = Fault(phase, victim, actor=victim, count=count)
    broken = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path), fault=fault)
    assert broken.status == 1, broken.output
    assert (pids_of(broken.folder) / "done").exists() and left_alive(broken.folder) == []
    assert f"rank {victim} (generate)" in broken.output
    before = continues(tmp_path, whole)
    assert bool(before["lm_eval"]) == (phase == "likelihoods")


def test_the_controller_is_killed(tmp_path, whole):
    slow = "env.digits.kwargs.delay_s=0.1"
    process = launch(tmp_path / "run", *LOCAL, *overrides(tmp_path, slow), fault=Fault("never", 0))
    wait_until(lambda: judged(tmp_path) >= ANSWERS["sampled"] // 2, "half of the answers")
    os.kill(int(read_record(tmp_path / "run").job_id), signal.SIGKILL)
    assert process.wait(60) == 1
    assert left_alive(tmp_path / "run") == []
    continues(tmp_path, whole, slow)


def test_a_crash_after_progress_is_restarted_by_itself(tmp_path, whole):
    fault = Fault("likelihoods", 1, actor=1, count=1, once=True)
    more = overrides(tmp_path, "cluster.requeue.max_restarts=1")
    run = submit(tmp_path / "run", *LOCAL, *more, fault=fault)
    assert scores(run) == scores(whole)
    first, second = run.verdicts()
    assert first.startswith("requeue: crashed with status ") and second == "done"
    assert judged(tmp_path) == ANSWERS["sampled"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_ends_the_attempt_with_open_work(tmp_path, whole, number):
    fault = Fault("decode", 0, actor=0, count=4, signal=number)
    run = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path, "env.digits.kwargs.delay_s=0.1"), fault=fault)
    assert scores(run) == scores(whole)
    *early, last = run.verdicts()  # the signal comes in each attempt that has as much left
    assert last == "done" and early and set(early) == {f"requeue: {number.name} came"}
    assert judged(tmp_path) < 2 * ANSWERS["sampled"]
    assert left_alive(run.folder) == []


def test_a_time_limit_ends_the_attempt_with_open_work(tmp_path, whole):
    more = overrides(tmp_path, "env.digits.kwargs.delay_s=0.4", "checkpointing.checkpoint_must_save_by=00:00:00:08")
    run = submit(tmp_path / "run", *LOCAL, *more)
    assert scores(run) == scores(whole)
    *early, last = run.verdicts()
    assert early and last == "done"
    assert all(verdict.startswith("requeue: checkpointing.checkpoint_must_save_by ") for verdict in early)


@pytest.mark.parametrize("engines", [1, 3])
def test_scores_do_not_depend_on_the_number_of_engines(tmp_path, whole, engines):
    run = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path, f"cluster.generate.ranks_per_node={engines}"))
    assert scores(run) == scores(whole)
    assert kept(run.folder) == kept(whole.folder)


def test_failed_answers_are_asked_again(tmp_path, whole):
    """A line without a score, a torn one, and one that a power cut made unreadable."""
    run = submit(tmp_path / "run", *LOCAL, *overrides(tmp_path))
    assert scores(run) == scores(whole)
    path = run.folder / "answers/sampled.jsonl"
    first, second, *others, last = path.read_bytes().splitlines(keepends=True)
    unjudged = json.dumps({**json.loads(first), "score": None}).encode() + b"\n"
    path.write_bytes(b"".join([unjudged, b"\0" * len(second.strip()) + b"\n", *others, last[:-9]]))
    (run.folder / "done.json").unlink()
    told = judged(tmp_path)
    again = submit(run.folder, *LOCAL, *overrides(tmp_path))
    assert again.status == 0, again.output
    assert (run.folder / "scores.json").read_text() == scores(whole)
    assert judged(tmp_path) - told == 3
