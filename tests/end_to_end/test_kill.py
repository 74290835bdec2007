"""A run that is killed at any moment ends, leaves nothing behind, and its rerun is the uninterrupted run to the last bit.

Two train and two generate ranks. Here: each phase once on the local executor, with the victim changing. Every rank in every
phase, on both executors, is `make test-long`.
"""

import os
import random
import signal
import time

import pytest

from tests.end_to_end.runs import LOCAL, SLURM, Fault, Run, launch, left_alive, pids_of, submit

# Which rank enters the phase: rank 0 the train realm's, rank 2 the generate realm's.
ACTORS = {"decode": 2, "forward": 0, "step": 0, "receive": 2, "send": 0, "write": 0}
PHASES = {"rollout": "decode", "forward": "forward", "step": "step", "refit": "send", "save": "write"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = submit(tmp_path_factory.mktemp("whole") / "run", *LOCAL)
    assert run.status == 0, run.output
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert len({line["train/loss"] for line in lines}) == 4  # it does learn something
    return lines


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


@pytest.mark.parametrize(("victim", "verb"), [(3, "rollout"), (0, "step"), (1, "save")])
def test_kill_and_rerun(tmp_path, uninterrupted, victim, verb):
    phase = PHASES[verb]
    rerun = kill_and_rerun(tmp_path / "run", Fault(phase, victim, ACTORS[phase], count=3), LOCAL)
    assert rerun.metrics() == uninterrupted


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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_again_and_again_comes_to_the_same_end(tmp_path):
    """A random rank killed at random moments, while loading, saving, anywhere, until the run has ended all the same."""
    steps = "grpo.max_num_steps=120"
    whole = submit(tmp_path / "whole", *LOCAL, steps)
    assert whole.status == 0, whole.output
    draw = random.Random(0)
    folder, progress = tmp_path / "run", [0]
    while not (folder / "done.json").exists():
        assert len(progress) < 60, f"no end in sight: {progress}"
        for stale in pids_of(folder).glob("[0-9]*"):
            stale.unlink()
        process = launch(folder, *LOCAL, steps, fault=Fault("never", victim=0))
        victim = pids_of(folder) / str(draw.randrange(4))
        while not victim.exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 12))
        if process.poll() is None:
            os.kill(int(victim.read_text()), signal.SIGKILL)
        process.communicate(timeout=60)
        assert left_alive(folder) == []
        progress.append(len(list((folder / "checkpoints").glob("step_*"))))
    assert progress == sorted(progress), "a checkpoint was lost"
    assert len(progress) > 5, f"hardly killed at all: {progress}"
    print(f"checkpoints after each of {len(progress) - 1} starts: {progress[1:]}")
    assert Run(folder, 0, "", 0).metrics() == whole.metrics()


@pytest.mark.parametrize(("victim", "phase", "verb"), [(3, "decode", "rollout")])
def test_a_stopped_rank_is_named(tmp_path, victim, phase, verb):
    fault = Fault(phase, victim, actor=victim, signal=signal.SIGSTOP)
    run = submit(tmp_path / "run", *LOCAL, "cluster.timeouts.silence=6", fault=fault)
    assert run.status == 1
    failure = run.failure()
    assert (failure["rank"], failure["realm"], failure["verb"], failure["phase"]) == (victim, "generate", verb, phase)
    assert f"rank {victim} (generate)" in run.output
    assert f"verb '{verb}', phase '{phase}'" in run.output
    assert left_alive(tmp_path / "run") == []
