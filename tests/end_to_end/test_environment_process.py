"""Whole runs with environments in threads of the engine's process, and in a process of their own, the default, that ends."""

import pytest

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, submit


@pytest.mark.full  # by default: tests/rollout/test_environment_process.py
def test_in_threads_a_run_is_the_same_to_the_last_bit(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, "policy.generation.environment_process=false")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted


@pytest.mark.full
def test_a_run_continues_when_the_environment_process_dies(tmp_path):
    """The answer that it was scoring then counts as wrong."""
    dies = ("env.digits.kind=tests.end_to_end.environment.DiesOnce", f"env.digits.kwargs.mark={tmp_path / 'mark'}")
    run = submit(tmp_path / "run", *LOCAL, *dies)
    assert run.status == 0, run.output
    logs = "".join(path.read_text() for path in run.folder.glob("attempts/*/rank*.log"))
    assert logs.count("was killed by SIGKILL while it judged 1 turns; another process takes its place") == 1
    rollouts = [one for path in run.folder.glob("rollouts/step_*.jsonl") for one in read_rollouts(path)]
    assert not any(one.get("failure") for one in rollouts)
    (broke,) = [one for one in rollouts if one.get("broke")]
    assert (broke["broke"], broke["reward"]) == ("the environments' process was killed by SIGKILL", 0.0)
