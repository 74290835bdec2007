"""Read from a run folder which checkpoints are evaluated, being evaluated, or pending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.runs import follower_process, score_tables, waiting_checkpoints
from launch.runs.evaluation_sources import FOLDER
from pipeline.checkpoints import checkpoint
from pipeline.config import RecipeError


@dataclass(frozen=True)
class SuiteRecord:
    """The evaluations of a run by one suite."""

    suite: str
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)  # contents of scores.json, by step
    begun: list[int] = field(default_factory=list)  # submitted, and not complete
    pending: list[int] = field(default_factory=list)  # kept, and not submitted
    failed: dict[int, str] = field(default_factory=dict)  # given up: why, by step
    followed: bool = False  # whether a process evaluates new checkpoints


def of_run(run_dir: Path) -> Iterator[SuiteRecord]:
    """Yield the evaluations of a run by each suite."""
    for folder in sorted((run_dir / FOLDER).glob("*/")):
        if any(folder.glob("step_*")) or (folder / follower_process.RECORD).exists():
            yield _of_suite(folder)


def _of_suite(folder: Path) -> SuiteRecord:
    followed = follower_process.read_record(folder)
    failures = dict(followed.failed) if followed else {}
    record = SuiteRecord(folder.name, failed=failures, followed=follower_process.is_followed(folder))
    for evaluation in sorted(path for path in folder.glob("step_*") if checkpoint.NAME.fullmatch(path.name)):
        step = int(evaluation.name.removeprefix("step_"))
        scores = _scores(evaluation)
        if scores is not None and (evaluation / "done.json").exists():
            record.scores[step] = scores
            record.failed.pop(step, None)
        elif (evaluation / "job.json").exists():
            record.begun.append(step)
        elif waiting_checkpoints.checkpoint_folder(evaluation).exists() and step not in failures:
            record.pending.append(step)
    return record


def _scores(folder: Path) -> dict[str, Any] | None:
    try:
        return score_tables.read(folder)
    except RecipeError:
        return None
