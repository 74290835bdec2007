"""Run a recipe in which a judge dies."""

import pytest

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, submit


@pytest.mark.full
def test_a_run_continues_when_a_judge_dies(tmp_path):
    """Check that the answer counts as wrong that a judge was scoring when it died."""
    dies = ("env.digits.kind=tests.end_to_end.environment.DiesOnce", f"env.digits.kwargs.mark={tmp_path / 'mark'}")
    run = submit(tmp_path / "run", *LOCAL, *dies)
    assert run.status == 0, run.output
    logs = "".join(path.read_text() for path in run.folder.glob("attempts/*/rank*.log"))
    assert logs.count("broke its environment and counts as wrong: its judge was killed by SIGKILL") == 1
    rollouts = [one for path in run.folder.glob("rollouts/step_*.jsonl") for one in read_rollouts(path)]
    assert not any(one.get("failure") for one in rollouts)
    (broke,) = [one for one in rollouts if one.get("broke")]
    assert (broke["broke"], broke["reward"]) == ("its judge was killed by SIGKILL", 0.0)
