"""Whole runs with trackers, where their packages are installed: killed three times and resumed, each step is in each once."""

import pytest

from pipeline.observe.metrics import NOT_REPRODUCIBLE, read
from pipeline.tracking.position import run_id
from tests.end_to_end.runs import LOCAL, Fault, submit
from tests.tracking.records import READ

KEYS = (
    "grpo.max_num_steps=9",
    "grpo.val_period=3",
    "grpo.max_val_samples=4",
    "checkpointing.save_period=2",
    "logger.wandb_enabled=true",
    "logger.wandb.mode=offline",
    "logger.mlflow_enabled=true",
    "logger.trackio_enabled=true",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_three_times_is_one_run_of_each_tracker(tmp_path, monkeypatch):
    for name in READ:
        pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    whole = submit(tmp_path / "whole", *LOCAL, *KEYS[:4])
    assert whole.status == 0, whole.output
    folder = tmp_path / "run"
    for count in (3, 3, 3):
        killed = submit(folder, *LOCAL, *KEYS, fault=Fault("step", victim=0, count=count))
        assert killed.status == 1
    run = submit(folder, *LOCAL, *KEYS)
    assert run.status == 0, run.output
    assert run.metrics() == whole.metrics()
    lines = {line["step"]: line for line in read(folder / "metrics.jsonl")}
    for name, rows in READ.items():
        found = rows(folder, run_id(folder))
        own = [(step, values) for step, values in found if "time/step" in values]
        assert [step for step, _ in own] == sorted(lines), name
        for step, values in own:
            line = {key: value for key, value in lines[step].items() if key not in ("step", "time") and value is not None}
            assert values.keys() == line.keys(), name
            same = [key for key in line if not key.startswith(NOT_REPRODUCIBLE)]
            assert len(same) > 5 and {key: values[key] for key in same} == {key: line[key] for key in same}, (name, step)
    assert not list((folder / "tracking").glob("*-2*"))
