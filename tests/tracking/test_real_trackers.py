"""Real trackers of a run that was killed three times: each step once, with the values of metrics.jsonl, under one run.

Each package is an extra, so its tests run where it is installed: `pip install 'hetstep[wandb,mlflow,trackio]'`.
"""

import importlib
import json
import sqlite3
import subprocess
import time
from contextlib import contextmanager

import pytest

from launch import track
from pipeline import config
from pipeline.tracking.feed import Feed
from pipeline.tracking.position import run_id
from tests.launch import made_runs
from tests.tracking.runs import ROOT, Writer, command, evaluated, expected, made, sampled

ON = {
    "wandb": ("logger.wandb_enabled=true", "logger.wandb.mode=offline"),
    "mlflow": ("logger.mlflow_enabled=true", "logger.mlflow.tags={team: a}"),
    "trackio": ("logger.trackio_enabled=true",),
}


def of_wandb(folder, record):
    log = importlib.import_module("pipeline.trackers.transaction_log")
    rows = [
        {key: json.loads(value) for key, value in row.items()}
        for path in sorted((folder / "tracking/wandb/wandb").glob(f"offline-run-*-{record}/run-{record}.wandb"))
        for written, _ in log.records(path)
        for row in log.histories(written)
    ]
    return [(row["_step"], {key: value for key, value in row.items() if not key.startswith("_")}) for row in rows]


def of_mlflow(folder, record):
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder}/tracking/mlflow/mlflow.db")
    (run,) = client.search_runs(["1"], f"tags.`hetstep.run` = '{record}'")
    assert run.data.tags["team"] == "a" and run.data.params["algorithm"] == "grpo"
    rows = {}
    for key in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, key)
        for metric in history:
            rows.setdefault(metric.step, []).append((key.replace("_at_", "@"), metric.value))
    for pairs in rows.values():
        assert len(pairs) == len(dict(pairs))  # no step of a metric twice
    own = {step: [(key, value) for key, value in pairs if not key.startswith("evaluation/")] for step, pairs in rows.items()}
    return [(step, dict(pairs)) for step, pairs in sorted(own.items())]


def of_trackio(folder, record):
    rows = sqlite3.connect(folder.parent / "trackio/hetstep.db").execute(
        "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (record,)
    )
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    return [(step, values) for step, values in found if any(not key.startswith("evaluation/") for key in values)]


PATIENCE_S = 240
READ = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}


@contextmanager
def process_of(folder, name):
    """Run the process beside rank 0 during the block, and kill it. Yields a function that waits until a step has arrived."""
    position = folder / f"tracking/{name}.json"
    with open(folder / "attempts/1-0/trackers.log", "ab") as log:
        process = subprocess.Popen(
            command("pipeline.tracking.process", folder), cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log
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
    first = {3: 1, 4: 1, 7: 2} | dict.fromkeys((5, 6), 2) | {1: 1, 2: 1, 8: 3, 9: 3, 10: 4, 11: 4, 12: 4}
    assert sent == {step: expected(folder, (step,), times)[step] for step, times in sorted(first.items())}


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
    assert (
        dict(READ[name](folder, run_id(folder)))[2 if name != "trackio" else 1]
        == expected(folder)[2 if name != "trackio" else 1]
    )


def test_no_key_is_written_into_the_run_folder(tmp_path, name, monkeypatch):
    key = "wandb_v1_" + "k3yk3y" * 8
    for variable in ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.setenv(variable, key)
    folder = made(tmp_path / "run", *ON[name])
    Writer(folder).steps(2)
    process = feed(name, folder)
    process.look(True)
    process.close(True)
    assert not [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
