"""What each real tracker has of a run: (step, values) of each of its rows, in the order of the steps."""

import importlib
import json
import os
import sqlite3
from pathlib import Path


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
    assert run.data.params["algorithm"] == "grpo"
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
    rows = sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "hetstep.db").execute(
        "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", (record,)
    )
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    return [(step, values) for step, values in found if any(not key.startswith("evaluation/") for key in values)]


READ = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio}
