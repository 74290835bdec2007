"""A run that is killed at any moment ends, leaves nothing behind, and its rerun is the uninterrupted run to the last bit.

Two train and two generate ranks. Here: each phase once on the local executor, with the victim changing. Every rank in every
phase, on both executors, is `make test-long`, and so are kills at random moments (test_many_kills.py).
"""

import pytest

from tests.end_to_end.runs import LOCAL, SLURM, Fault, left_alive, pids_of, submit

# Which rank enters the phase: rank 0 the train realm's, rank 2 the generate realm's.
ACTORS = {"decode": 2, "forward": 0, "step": 0, "receive": 2, "send": 0, "write checkpoint": 0}
PHASES = {"rollout": "decode", "forward": "forward", "step": "step", "refit": "send", "save": "write checkpoint"}


def kill_and_rerun(folder, fault, placement, env=None):
    broken = submit(folder, *placement, env=env, fault=fault)
    assert broken.status == 1, broken.output
    assert (pids_of(folder) / "done").exists(), "the fault never struck"
    assert broken.seconds < 120
    assert left_alive(folder) == []
    assert not (folder / "done.json").exists()
    whole = submit(folder, *placement, env=env)
    assert whole.status == 0, whole.output
    return whole


def test_kill_and_rerun(tmp_path, uninterrupted):
    rerun = kill_and_rerun(tmp_path / "run", Fault("step", victim=0, count=3), LOCAL)
    assert rerun.metrics() == uninterrupted


@pytest.mark.full  # by default: tests/train/test_deterministic.py
def test_with_deterministic_kernels_too(tmp_path, uninterrupted):
    """On CPUs the key changes no bit."""
    rerun = kill_and_rerun(tmp_path / "run", Fault("step", victim=0, count=3), (*LOCAL, "policy.deterministic=true"))
    assert rerun.metrics() == uninterrupted


@pytest.mark.full  # by default: tests/launch/executors/test_local.py
@pytest.mark.parametrize(
    ("victim", "verb", "count"),
    [pytest.param(3, "rollout", 3, marks=pytest.mark.long), (1, "save", 3)],
)
def test_a_killed_run_is_restarted_by_itself(tmp_path, uninterrupted, victim, verb, count):
    """Kill it in the third step. The second attempt has fewer steps left than the fault's count."""
    phase = PHASES[verb]
    fault = Fault(phase, victim, ACTORS[phase], count)
    run = submit(tmp_path / "run", *LOCAL, "cluster.requeue.max_restarts=1", fault=fault)
    assert run.status == 0, run.output
    first, second = run.verdicts()
    assert first.startswith("requeue: crashed with status ") and first.endswith(", after checkpoint 2; restart 1 of 1")
    assert second == "done"
    assert run.metrics() == uninterrupted
    assert left_alive(run.folder) == []


@pytest.mark.full
def test_a_curriculum_continues_with_the_same_pools(tmp_path):
    """A restarted run takes the prompts, and so has the metrics, of one that was not killed."""
    keys = (
        "data.curriculum.enabled=true",
        "data.curriculum.easy=0.6",
        "data.curriculum.hard=0.3",
        "data.curriculum.hard_share=0.5",
    )
    whole = submit(tmp_path / "whole", *LOCAL, *keys)
    assert whole.status == 0, whole.output
    fault = Fault(PHASES["rollout"], 3, ACTORS[PHASES["rollout"]], 3)
    killed = submit(tmp_path / "killed", *LOCAL, *keys, "cluster.requeue.max_restarts=1", fault=fault)
    assert killed.status == 0 and len(killed.verdicts()) == 2, killed.output
    assert killed.metrics() == whole.metrics()
    last = whole.metrics()[-1]
    assert last["curriculum/easy"] + last["curriculum/hard"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", ["local", "slurm"])
@pytest.mark.parametrize("verb", PHASES)
@pytest.mark.parametrize("victim", range(4))
def test_kill_every_rank_in_every_phase(tmp_path, request, uninterrupted, victim, verb, executor):
    phase = PHASES[verb]
    env = request.getfixturevalue("slurm_cluster").env if executor == "slurm" else None
    placement = SLURM if executor == "slurm" else LOCAL
    rerun = kill_and_rerun(tmp_path / "run", Fault(phase, victim, ACTORS[phase], count=3), placement, env)
    assert rerun.metrics() == uninterrupted
