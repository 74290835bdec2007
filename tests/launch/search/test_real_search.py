"""A search of real runs: one with a bad learning rate is stopped, and saved at the step where it stopped."""

import json
import os

import pytest

pytest.importorskip("optuna")

from launch.api.sweeps import SweepRun
from tests.launch.search.suites import LR, write_search
from tests.launch.sweeps.suites import ROOT, sweep

pytestmark = pytest.mark.full
STEPS = 40


def test_a_search_of_tiny_sft_stops_and_saves_the_bad_trial(tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    path = write_search(
        tmp_path,
        recipe="tiny_sft",
        overrides={"sft": {"max_num_steps": STEPS, "val_at_end": False}, "policy.scheduler": None},
        parameters={LR: [2.0e-3, 1.0e-9]},
        metric="train/loss",
        direction="minimize",
        pruner="asha",
        min_steps=4,
        reduction_factor=2,
        top={"overrides": {"cluster": {"executor": "local", "train": {"ranks_per_node": 1}}}},
    )
    status, output = sweep(f"sweep={path}", "id=x", env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path)
    assert status == 0, output
    folder = tmp_path / "sweeps/some/x"
    found = json.loads((folder / "verdict.json").read_text())["trials"]
    assert [each["state"] for each in found] == ["complete", "pruned"]
    assert [each["pruned_at"] for each in found] == [None, 4]
    for name, run in SweepRun(folder).runs().items():
        status = run.status()
        if name == "trial-0000":
            assert status.state == "done" and status.step == STEPS
        else:
            assert status.state == "stopped" and 4 <= status.step < STEPS and status.checkpoint == status.step
