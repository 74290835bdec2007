"""Whole runs with environments in threads of the engine's process, and in one of their own, which is the default, that dies."""

import pytest

from pipeline.metrics import read
from tests.end_to_end.runs import LOCAL, submit


def test_in_threads_a_run_is_the_same_to_the_last_bit(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, "policy.generation.environment_process=false")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted


@pytest.mark.full
def test_a_run_goes_on_when_the_process_dies(tmp_path):
    """Of the answer that it was judging."""
    dies = ("env.digits.kind=tests.end_to_end.environment.DiesOnce", f"env.digits.kwargs.mark={tmp_path / 'mark'}")
    run = submit(tmp_path / "run", *LOCAL, *dies)
    assert run.status == 0, run.output
    logs = "".join(path.read_text() for path in run.folder.glob("attempts/*/rank*.log"))
    assert logs.count("was killed by SIGKILL: 1 turns that it was judging fail, another process takes its place") == 1
    failed = [one for path in run.folder.glob("rollouts/step_*.jsonl") for one in read(path) if one.get("failure")]
    assert [one["failure"] for one in failed] == ["the environments' process was killed by SIGKILL"]
