"""Runs that stop early, on real ranks: they are complete, say why, and resume to the bit."""

import json
import subprocess
import sys

import pytest

from launch.runs.run_folder import RunFolder
from launch.runs.run_state import state
from pipeline.checkpoints.checkpoint import complete_in
from tests.end_to_end.runs import LOCAL, ROOT, Fault, submit

# Never an improvement: the first validation is the best, and the third after it is the last.
STOP = (
    "grpo.max_num_steps=6",
    "grpo.val_period=1",
    "grpo.max_val_samples=2",
    "grpo.stop_at_validation_metric=val/reward",
    "grpo.stop_patience=3",
    "grpo.stop_min_delta=100",
)


@pytest.mark.full
def test_a_killed_run_stops_where_the_uninterrupted_one_does(tmp_path):
    whole = submit(tmp_path / "whole", *LOCAL, *STOP)
    assert whole.status == 0, whole.output
    assert [line["step"] for line in whole.metrics()] == [1, 2, 3, 4]
    done = json.loads((whole.folder / "done.json").read_text())
    assert done["step"] == 4 and "val/reward has not improved" in done["early_stop"]
    assert complete_in(whole.folder / "checkpoints")[-1].step == 4
    seen = state(RunFolder.at(whole.folder))
    assert (seen.name, seen.why) == ("done", done["early_stop"])

    killed = submit(tmp_path / "killed", *LOCAL, *STOP, fault=Fault("step", victim=0, count=3))
    assert killed.status == 1 and not (killed.folder / "done.json").exists()
    rerun = submit(tmp_path / "killed", *LOCAL, *STOP)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == whole.metrics()
    assert json.loads((rerun.folder / "done.json").read_text()) == done


@pytest.mark.full
def test_sft_stops_at_a_threshold(tmp_path):
    """Validate before the first step too: nothing is trained once the threshold is reached there."""
    for threshold, step in ((100.0, 0), (0.0, 4)):  # a loss is below 100, and never below 0
        folder = tmp_path / str(step)
        keys = ["sft.max_num_steps=4", "sft.val_period=2", "sft.val_at_start=true"]
        keys += ["sft.stop_at_validation_metric=val:loss", f"sft.stop_at_validation_threshold={threshold}"]
        command = [sys.executable, "launch/submit.py", "recipe=tiny_sft", f"run_dir={folder}", *LOCAL, *keys]
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
        done = json.loads((folder / "done.json").read_text())
        assert done["step"] == step and ("early_stop" in done) == (step == 0)
