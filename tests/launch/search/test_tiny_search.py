"""recipes/sweeps/tiny_search.yaml on a real Slurm: 24 trials of a real GRPO, killed once."""

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from launch.runs.attempts import all_attempts
from tests.launch.sweeps.suites import ROOT, known, launch, submitted, sweep
from tests.launch.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3600)]
TRIALS, STEPS = 24, 24
HOUR = 3600.0


def found(folder: Path) -> list[dict]:
    return json.loads((folder / "verdict.json").read_text())["trials"]


def steps(folder: Path) -> int:
    """Return the steps of all trials' runs."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl"))


def test_24_trials_are_submitted_once_and_worse_ones_stop_early(slurm_cluster, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    env = {**os.environ, **slurm_cluster.env}
    command = ["sweep=tiny_search", "id=x", "cluster.executor=slurm"]
    process = launch(*command, env=env, cwd=tmp_path)
    folder = tmp_path / "runs/sweeps/tiny_search/x"
    wait_until(lambda: known(folder) >= 6, "the first submissions", seconds=HOUR / 4)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    status, output = sweep(*command, env=env, cwd=tmp_path, timeout=HOUR)
    assert status == 0, output
    trials = found(folder)
    names = submitted(folder)
    assert len(trials) == TRIALS
    assert len(set(names)) == len(names) >= TRIALS  # one is tiny_sft, and the killed command may not have recorded one
    assert [len(all_attempts(path)) for path in folder.glob("runs/*")] == [1] * TRIALS
    pruned = [each for each in trials if each["state"] == "pruned"]
    assert pruned and {each["state"] for each in trials} == {"pruned", "complete"}
    assert steps(folder) < TRIALS * STEPS
