"""recipes/sweeps/tiny_search.yaml on a real Slurm: 24 trials of a real GRPO, killed once, against a grid of the same space."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("optuna")

from launch.runs.attempts import all_attempts
from tests.launch.search.suites import KL, LR
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


def train_seconds(folder: Path) -> float:
    """Return the seconds of all steps of all trials."""
    lines = [json.loads(line) for path in folder.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    return sum(line.get("time/step", 0.0) for line in lines)


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
    best = max(each["value"] for each in trials if each["state"] == "complete")
    print(f"{TRIALS} trials, {len(pruned)} pruned: {steps(folder)} of {TRIALS * STEPS} steps, "
          f"{train_seconds(folder):.0f} s of steps; best {best:.3f}", file=sys.stderr)  # fmt: skip
    for each in sorted(trials, key=lambda each: -(each["value"] or 0))[:3]:
        print(each["state"], each["values"][LR], each["values"][KL], each["value"], file=sys.stderr)


def test_a_grid_of_the_same_space(slurm_cluster, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    suite = yaml.safe_load((ROOT / "recipes/sweeps/tiny_search.yaml").read_text())
    lr = [1.0e-5, 1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3, 1.0e-2]
    for key in ("min_steps", "reduction_factor"):
        del suite["search"][key]
    suite["search"] |= {"parameters": {LR: lr, KL: [0.0, 0.1, 0.2, 0.3]}, "sampler": "grid", "pruner": "none"}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(suite))
    env = {**os.environ, **slurm_cluster.env}
    status, output = sweep(f"sweep={path}", "id=x", "cluster.executor=slurm", env=env, cwd=tmp_path, timeout=HOUR)
    assert status == 0, output
    folder = tmp_path / "runs/sweeps/grid/x"
    trials = found(folder)
    assert [each["state"] for each in trials] == ["complete"] * TRIALS and steps(folder) == TRIALS * STEPS
    print(f"grid: {steps(folder)} steps, {train_seconds(folder):.0f} s of steps; "
          f"best {max(each['value'] for each in trials):.3f}", file=sys.stderr)  # fmt: skip
