"""Find the data for trackers in a run folder, besides steps: recipe, samples, evaluations, report and the exported model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pipeline.config import environment_names
from pipeline.files import small_files
from pipeline.files.stored_files import is_encrypted
from pipeline.recipe import secrets, user_files
from pipeline.trackers.tracker import LoggedStep, Tracker

FILES = ("recipe.yaml", "report.html")
SAMPLES = 16
"""Maximum number of rollouts of a step that are sent."""


class _Metric(TypedDict):
    value: float | None


class _Task(TypedDict):
    metrics: dict[str, _Metric]


class _Scores(TypedDict):
    """The keys of an evaluation's scores.json that trackers receive."""

    tasks: dict[str, _Task]


@dataclass(frozen=True)
class Attachment:
    """Data that is sent to a tracker once, and again whenever its version changes. send: a function of the tracker."""

    name: str
    version: str
    send: Callable[[Tracker], None]


def attachments(run_dir: Path, save_period: int, settled: int) -> Iterator[Attachment]:
    """Yield the attachments that the run folder has now.

    settled: the last step whose rollouts are complete. Samples are the rollouts of validations, and of each step after which
    the run saves a checkpoint (checkpointing.save_period). Files that hold a secret and encrypted rollouts are left out.
    """
    for name in FILES:
        if (path := run_dir / name).is_file() and not _holds_secret(path):
            sent = environment_names.recipe_file(run_dir) if name == "recipe.yaml" else path
            yield Attachment(name, _version(path), lambda tracker, path=sent: tracker.log_file(path))
    yield from _samples(run_dir / "rollouts", save_period, settled)
    for path in sorted(run_dir.glob("evaluations/*/step_*/scores.json")):
        name = str(path.parent.relative_to(run_dir))
        yield Attachment(name, _version(path), lambda tracker, path=path: _send_scores(tracker, path))
    if (model := run_dir / "hf").exists():
        folder = model.resolve()
        yield Attachment("hf", str(folder), lambda tracker: tracker.log_model(folder))


def _samples(folder: Path, save_period: int, settled: int) -> Iterator[Attachment]:
    for path in sorted(folder.glob("*_*.jsonl")):
        kind, _, number = path.stem.rpartition("_")
        chosen = int(number) <= settled and (kind == "val" or int(number) % save_period == 0)
        if chosen and not _is_encrypted(path):
            yield Attachment(path.stem, "", lambda tracker, path=path: _send_samples(tracker, path))


def _is_encrypted(path: Path) -> bool:
    with user_files.open_file(path) as file:
        return is_encrypted(file.read(8))


def _send_samples(tracker: Tracker, path: Path) -> None:
    kind, _, number = path.stem.rpartition("_")
    samples = list(itertools.islice(small_files.lines(path, dict[str, Any]), SAMPLES))
    tracker.log_samples(kind, int(number), samples)


def _send_scores(tracker: Tracker, path: Path) -> None:
    scores = small_files.read(path, _Scores)
    if scores is None:  # somebody has removed it meanwhile
        return
    found = {
        f"{task}/{metric}": each["value"]
        for task, summary in scores["tasks"].items()
        for metric, each in summary["metrics"].items()
        if each["value"] is not None and math.isfinite(each["value"])
    }
    step = int(path.parent.name.removeprefix("step_"))
    tracker.log_scores(path.parents[1].name, LoggedStep(step, path.stat().st_mtime, found))


def _holds_secret(path: Path) -> bool:
    """Return whether a YAML file holds a secret: a recipe may have been changed since submission checked it.

    Other files are not read, and count as free of secrets.
    """
    text = (small_files.read_text(path) or "") if path.suffix == ".yaml" else ""
    return secrets.redact(text) != text


def _version(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
