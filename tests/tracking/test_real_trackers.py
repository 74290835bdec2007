"""Real trackers of a run that was killed three times: each step once, with the values of metrics.jsonl, under one run.

Each package is an extra, so its tests run where it is installed: `pip install '.[wandb,mlflow,trackio]'`.
"""

import importlib
import json
import subprocess
import time
from contextlib import contextmanager

import pytest

from launch import track
from pipeline import config
from pipeline.tracking.feed import Feed
from pipeline.tracking.position import run_id
from tests.launch import made_runs
from tests.tracking.records import READ
from tests.tracking.runs import ROOT, Writer, command, evaluated, expected, made, sampled

ON = {
    "wandb": ("logger.wandb_enabled=true", "logger.wandb.mode=offline"),
    "mlflow": ("logger.mlflow_enabled=true", "logger.mlflow.tags={team: a}"),
    "trackio": ("logger.trackio_enabled=true",),
}


PATIENCE_S = 240


@contextmanager
def process_of(folder, name):
    """Run the process beside rank 0 during the block, and kill it. Yields a function that waits until a step has arrived."""
    position = folder / f"tracking/{name}.json"
    with open(folder / "attempts/1-0/trackers.log", "ab") as log:
        process = subprocess.Popen(
            command("pipeline.tracking.tracking_process", folder), cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log
        )

    def arrived(step):
        deadline = time.monotonic() + PATIENCE_S
        while not position.exists() or json.loads(position.read_text())["last"] < step:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    try:
        yield arrived
    finally:
        process.kill()
        process.communicate()


def feed(name, folder):
    return Feed(name, config.read(folder / "recipe.yaml"), folder)


@pytest.fixture(params=list(ON))
def name(request, tmp_path, monkeypatch):
    pytest.importorskip(request.param)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = importlib.import_module("trackio.sqlite_storage") if request.param == "trackio" else None
    if trackio:  # read when it was imported
        for module in ("trackio.sqlite_storage", "trackio.utils"):
            monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
        (tmp_path / "trackio").mkdir()
    return request.param


@pytest.mark.timeout(1200)
def test_a_run_that_was_killed_three_times_is_one_run(tmp_path, name):
    folder = made(tmp_path / "run", *ON[name], "checkpointing.save_period=2")
    for start, (after, last) in enumerate(((None, 4), (2, 7), (6, 9), (9, 12)), 1):
        with process_of(folder, name) as arrived:
            writer = Writer(folder, after, times=start)
            for step in (last - 1, last):
                writer.steps(step)
                arrived(step)
    sampled(folder, "val", 4, 20)
    evaluated(folder, 4, 0.5)
    made_runs.ended(folder, 12)
    for _ in range(2):
        assert track.main([f"run={folder}"]) == 0
    sent = dict(rows := READ[name](folder, run_id(folder)))
    assert [step for step, _ in rows] == list(range(1, 13))
    first = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4)  # the start that ran a step first
    assert sent == {step: expected(folder, (step,), start)[step] for step, start in enumerate(first, 1)}


def test_a_replay_with_other_values_is_a_run_of_its_own(tmp_path, name):
    folder = made(tmp_path / "run", *ON[name])
    Writer(folder).steps(5)
    process = feed(name, folder)
    process.look(False)
    before = READ[name](folder, run_id(folder))
    Writer(folder, after=3, times=2, changed=0.5).steps(6)
    process.look(True)
    process.close(False)
    assert READ[name](folder, run_id(folder)) == before
    assert dict(READ[name](folder, f"{run_id(folder)}-2")) == expected(folder)


def test_a_long_step_arrives_whole(tmp_path, name):
    """More metrics than a request of MLflow or a block of W&B's file holds."""
    folder = made(tmp_path / "run", *ON[name])
    writer = Writer(folder)
    writer.steps(1)
    writer._metrics.log(2, {f"train/metric_{i}": i / 7 for i in range(2500)})
    process = feed(name, folder)
    process.look(True)
    process.close(True)
    assert dict(READ[name](folder, run_id(folder))) == expected(folder)


def test_no_key_is_written_into_the_run_folder(tmp_path, name, monkeypatch):
    key = "wandb_v1_" + "k3yk3y" * 8
    for variable in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.setenv(variable, key)
    folder = made(tmp_path / "run", *ON[name])
    Writer(folder).steps(2)
    process = feed(name, folder)
    process.look(True)
    process.close(True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if key.encode() in path.read_bytes()]
