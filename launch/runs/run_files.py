"""Read the files that submissions and ranks leave in a run folder: manifest.json, done.json, and files of attempts."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NotRequired, TypedDict

from pipeline.files import small_files
from pipeline.files.small_files import Count, Moment

GOES_ON = "Try to restore it from a copy, or to delete it: the run then goes on from its last complete checkpoint"


class GitState(TypedDict):
    """The checkout that a submission ran from."""

    commit: str
    dirty: bool


class SubmissionRecord(TypedDict):
    """An entry of manifest.json. launch/submission/origin.py defines further keys."""

    time: str  # ISO 8601, with its offset
    user: str
    host: str
    command: str
    executor: str
    job_id: str
    git: NotRequired[GitState | None]
    recipe: NotRequired[str | None]  # SHA-256
    versions: NotRequired[dict[str, str | None]]


class DoneRecord(TypedDict):
    """done.json, which marks a complete run."""

    step: Count
    early_stop: NotRequired[str | None]  # why it stopped before its last step
    evaluation: NotRequired[bool | None]


class FailureRecord(TypedDict):
    """failure.json, about the first rank that failed. The traceback is empty if the rank died, hung or was late."""

    rank: Count
    message: str
    realm: NotRequired[str]
    host: NotRequired[str]
    verb: NotRequired[str]
    phase: NotRequired[str]
    traceback: NotRequired[str]


def where(failure: FailureRecord) -> str:
    """Return a text that says where the rank failed."""
    facts = ((key, failure.get(key)) for key in ("realm", "host", "verb", "phase"))
    return ", ".join(f"{key} {value}" for key, value in facts if value)


def last_line(failure: FailureRecord) -> str:
    """Return the last line of the message, which names the error."""
    return (failure["message"].strip().splitlines() or [""])[-1]


StageRow = tuple[str, Moment, Moment | None]
"""A stage of the start-up: (name, begin, end or None while it goes on)."""


class StartupRecord(TypedDict):
    """startup.json: the stages until the first step, written by pipeline/job/startup.py."""

    began: Moment
    here: Count
    world: Count
    stages: list[StageRow]
    realms: dict[str, list[StageRow]]


def submissions(run_dir: Path, key: str = "run") -> list[SubmissionRecord]:
    """Return the entries of manifest.json, oldest first; [] before the first. Raises RecipeError for a damaged file."""
    path = run_dir / "manifest.json"
    entries = small_files.read(path, list[SubmissionRecord], key) or []
    for entry in entries:
        try:
            datetime.fromisoformat(entry["time"]).timestamp()
        except (ValueError, OverflowError):
            raise small_files.damaged(path, f"the time {entry['time']!r}", "ISO 8601", key) from None
    return entries


def completion(path: Path, key: str = "run") -> DoneRecord | None:
    """Return a done.json; None if the run is not complete. Raises RecipeError for a damaged file."""
    return small_files.read(path, DoneRecord, key, GOES_ON)


class _Gpu(TypedDict):
    name: str


class NodeRecord(TypedDict):
    """The keys of a node in nodes.json that commands read; pipeline/node_checks writes more."""

    gpus: NotRequired[list[_Gpu]]
    cpu: NotRequired[str | None]
    clock_skew_s: NotRequired[float | None]
    clock_error_s: NotRequired[float | None]


class _Nodes(TypedDict):
    nodes: dict[str, NodeRecord]


def nodes(attempt: Path) -> dict[str, NodeRecord]:
    """Return node name -> its record of an attempt's node checks; {} before the checks have ended."""
    record = small_files.read(attempt / "nodes.json", _Nodes)
    return {} if record is None else record["nodes"]
