"""Trackio: a local database that `trackio show` displays, a Hugging Face Space, or a Trackio server.

Each row has an id made of the run's id and the step. Trackio keeps ids unique, so a row that is sent again changes nothing.

Credentials come from `hf auth login` or HF_TOKEN, and for your own server from TRACKIO_WRITE_TOKEN. Left out: files and the
model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pipeline.recipe.values import Check, Line
from pipeline.trackers.tracker import LoggedStep, TrackedRun, messages


def _token_error(space: str) -> str | None:
    if "write_token=" in space:
        return "holds a write token; expected the address alone. Try to export TRACKIO_WRITE_TOKEN in the shell that submits"
    return None


@dataclass
class TrackioConfig:
    """The run in Trackio."""

    project: Line = "hetstep"
    """Project: lower- and upper-case letters, digits, - and _."""
    name: Line | None = None
    """Name of the run. null: the recipe's name."""
    space: Annotated[Line, Check(_token_error, "secret-in-recipe")] | None = None
    """Hugging Face Space such as user/name, created if it does not exist, or the address of a Trackio server. null:
    TRACKIO_SPACE_ID, or else the database on this machine (TRACKIO_DIR)."""


class TrackioTracker:
    """Records a run as a run of Trackio."""

    Section = TrackioConfig
    title = "Trackio"
    package = "trackio"
    place = ("space", "project")

    def __init__(self, section: TrackioConfig, run: TrackedRun, state: dict[str, Any]):
        self._section = section
        self._run = run
        self._name = (section.name or run.name) + run.id.removeprefix(run.first)
        self._client: Any = None  # of a Space or a server
        self._token: str | None = None

    def open(self) -> int | None:
        """Connect to the Space or the server, if there is one. Return None: Trackio recognizes rows that are sent again."""
        import_module("trackio")  # fails here where it is missing
        space = self._section.space or os.environ.get("TRACKIO_SPACE_ID")
        if space is None:
            return None
        if "://" not in space:
            deploy: Any = import_module("trackio.deploy")
            self._token = import_module("huggingface_hub").get_token()
            deploy.create_space_if_not_exists(space)
        write_token = os.environ.get("TRACKIO_WRITE_TOKEN")
        remote: Any = import_module("trackio.remote_client")
        self._client = remote.RemoteClient(space, hf_token=self._token, write_token=write_token, httpx_kwargs={"timeout": 30})
        return None

    def log(self, steps: Sequence[LoggedStep]) -> None:
        """Insert the rows of steps in one transaction or request."""
        self._insert([(f"{step.step}", step.step, step.time, dict(step.values)) for step in steps])

    def _insert(self, rows: Sequence[tuple[str, int, float, dict[str, Any]]]) -> None:
        """Insert rows of (end of the row's id, step, unix seconds, values)."""
        names = [f"{self._run.id}:{suffix}" for suffix, *_ in rows]
        steps, values = [row[1] for row in rows], [row[3] for row in rows]
        times = [datetime.fromtimestamp(row[2], UTC).isoformat() for row in rows]
        project, config = self._section.project, dict(self._run.recipe)
        if self._client is None:
            storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
            storage.bulk_log(project, self._name, values, steps, times, config, names, run_id=self._run.id)
            return
        shared = {"project": project, "run": self._name, "run_id": self._run.id, "config": config}
        entries = [
            {**shared, "metrics": metrics, "step": step, "timestamp": time, "log_id": name}
            for metrics, step, time, name in zip(values, steps, times, names, strict=True)
        ]
        self._client.predict(api_name="/bulk_log", logs=entries, hf_token=self._token)

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record samples as traces."""
        traces = [
            {
                "_type": "trackio.trace",
                "messages": messages(sample),
                "metadata": {key: sample.get(key) for key in ("reward", "finish", "prompt_index", "sample")},
                "spans": [],
            }
            for sample in samples
        ]
        self._insert([(f"samples:{kind}:{step}", step, datetime.now(UTC).timestamp(), {f"samples/{kind}": traces})])

    def log_scores(self, suite: str, scored: LoggedStep) -> None:
        """Insert a row of scores."""
        values = {f"evaluation/{suite}/{name}": value for name, value in scored.values.items()}
        self._insert([(f"evaluation:{suite}:{scored.step}", scored.step, scored.time, values)])

    def log_file(self, path: Path) -> None:
        """Do nothing: the recipe is the run's configuration."""

    def log_model(self, folder: Path) -> None:
        """Do nothing."""

    def close(self, ended: bool) -> None:
        """Do nothing: every row has arrived."""
