"""MLflow: a tracking server, or a database file.

A run is found again by its stored MLflow run id, or else by its tag `hetstep.run`. MLflow reports the last step of each
metric, so no step is recorded twice. MLflow allows fewer characters in names: `val/pass@4` becomes `val/pass_at_4`.

Credentials come from MLFLOW_TRACKING_USERNAME and _PASSWORD, MLFLOW_TRACKING_TOKEN, or ~/.mlflow/credentials.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.recipe.values import Line, leaves
from pipeline.trackers.tracker import COLUMNS, LoggedStep, TrackedRun

TAG = "hetstep.run"
EVALUATION = "evaluation/"
METRICS, PARAMETERS = 1000, 100
"""Maximum number of metrics and parameters of one request."""
LONGEST = 6000
"""Characters of a parameter's value."""
TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Defaults for this process, which tries again by itself; MLflow's would wait for minutes."""


@dataclass
class MlflowConfig:
    """The run in MLflow."""

    experiment_name: Line = "hetstep"
    """Experiment; created if it does not exist."""
    run_name: Line | None = None
    """Name of the run. null: the recipe's name."""
    tracking_uri: Line | None = None
    """Server, or a database such as sqlite:////path/mlflow.db; MLflow 3.17 refuses a folder. null: MLFLOW_TRACKING_URI, or else
    tracking/mlflow/mlflow.db in the run folder."""
    artifact_location: Line | None = None
    """Where a new experiment keeps files. null: the server's default; for sqlite, beside the database."""
    tags: dict[str, Line] = field(default_factory=dict)
    """Tags of the run."""


class MlflowTracker:
    """Records a run as a run of MLflow."""

    Section = MlflowConfig
    title = "MLflow"
    package = "mlflow"
    place = ("tracking_uri", "experiment_name")

    def __init__(self, section: MlflowConfig, run: TrackedRun, state: dict[str, Any]):
        self._section = section
        self._run = run
        self._state = state
        self._client: Any = None
        self._id = ""

    def open(self) -> int | None:
        """Find or create MLflow's run, and return the last step of its metrics."""
        for name, value in TIMEOUTS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        tracking: Any = import_module("mlflow.tracking")

        uri = self._section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or f"sqlite:///{self._run.files('mlflow') / 'mlflow.db'}"
        self._client = tracking.MlflowClient(tracking_uri=uri)
        self._id = self._find() or self._create(uri)
        self._state["run_id"] = self._id
        self._client.update_run(self._id, status="RUNNING")
        found = self._client.get_run(self._id)
        self._log_parameters(found.data.params)
        steps = [metric.step for metric in found.data._metric_objs if not metric.key.startswith(EVALUATION)]
        return max(steps, default=-1)

    def _find(self) -> str | None:
        exceptions: Any = import_module("mlflow.exceptions")

        if known := self._state.get("run_id"):
            try:
                if self._client.get_run(known).info.lifecycle_stage == "active":
                    return known
            except exceptions.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        experiment = self._client.get_experiment_by_name(self._section.experiment_name)
        if experiment is None:
            return None
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{TAG}` = '{self._run.id}'", max_results=1)
        return found[0].info.run_id if found else None

    def _create(self, uri: str) -> str:
        section = self._section
        experiment = self._client.get_experiment_by_name(section.experiment_name)
        if experiment is None:
            number = self._client.create_experiment(section.experiment_name, section.artifact_location or _beside(uri))
        else:
            number = experiment.experiment_id
        tags = {**section.tags, TAG: self._run.id, "hetstep.folder": str(self._run.folder)}
        if self._run.id != self._run.first:
            tags["hetstep.first"] = self._run.first
        return self._client.create_run(number, tags=tags, run_name=section.run_name or self._run.name).info.run_id

    def _log_parameters(self, known: Mapping[str, str]) -> None:
        """Record the recipe's values as parameters. MLflow refuses to change a parameter, so it has only the first values."""
        entities: Any = import_module("mlflow.entities")

        values = {_name(key): value for key, value in leaves(self._run.recipe)}
        missing = [entities.Param(key, _text(value)[:LONGEST]) for key, value in values.items() if key not in known]
        for at in range(0, len(missing), PARAMETERS):
            self._client.log_batch(self._id, params=missing[at : at + PARAMETERS])

    def log(self, steps: Sequence[LoggedStep]) -> None:
        """Record steps. A request has only whole steps."""
        for batch in self._batches(steps):
            self._client.log_batch(self._id, metrics=batch)

    def _batches(self, steps: Sequence[LoggedStep]) -> Iterator[list[Any]]:
        batch: list[Any] = []
        for each in steps:
            metrics = _metrics(each.values, each.step, each.time)
            if batch and len(batch) + len(metrics) > METRICS:
                yield batch
                batch = []
            batch += metrics
            while len(batch) > METRICS:
                yield batch[:METRICS]
                batch = batch[METRICS:]
        if batch:
            yield batch

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as a table that MLflow's page shows."""
        table = {"columns": list(COLUMNS), "data": [[sample.get(name) for name in COLUMNS] for sample in samples]}
        file = f"samples/{kind}_{step:06d}.json"
        self._client.log_text(self._id, json.dumps(table), file)
        tag = "mlflow.loggedArtifacts"
        tables = json.loads(self._client.get_run(self._id).data.tags.get(tag, "[]"))
        if (entry := {"path": file, "type": "table"}) not in tables:
            self._client.set_tag(self._id, tag, json.dumps([*tables, entry]))

    def log_scores(self, suite: str, scored: LoggedStep) -> None:
        """Record scores as metrics of the step."""
        named = {f"{EVALUATION}{suite}/{name}": value for name, value in scored.values.items()}
        self.log([LoggedStep(scored.step, scored.time, named)])

    def log_file(self, path: Path) -> None:
        """Keep a file as an artifact."""
        self._client.log_artifact(self._id, str(path))

    def log_model(self, folder: Path) -> None:
        """Set the tag `hetstep.model`."""
        self._client.set_tag(self._id, "hetstep.model", str(folder))

    def close(self, ended: bool) -> None:
        """Mark a complete run as finished."""
        if ended and self._id:
            self._client.set_terminated(self._id, "FINISHED")


def _metrics(values: Mapping[str, float], step: int, time: float) -> list[Any]:
    entities: Any = import_module("mlflow.entities")

    return [entities.Metric(_name(key), value, int(1000 * time), step) for key, value in values.items()]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _name(key: str) -> str:
    """Return a metric's key with only characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"), flags=re.ASCII)


def _beside(uri: str) -> str | None:
    """Return the folder for artifacts beside the file of an SQLite database; None for a server, which has its own."""
    path = uri.removeprefix("sqlite:///")
    return (Path(path).absolute().parent / "mlartifacts").as_uri() if path != uri else None
