"""Read the evaluations of a run: scores.json and answers/TASK.jsonl of each.

RUN_DIR/evaluations/SUITE/step_000050/     an evaluation of a checkpoint of the run
RUN_DIR/                                   the run itself, if it is an evaluation
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.evaluations import sources, tables
from pipeline.config import Problem, RecipeError
from pipeline.evaluation.answers import FOLDER, read_answers
from pipeline.evaluation.base import Answer

CONTAMINATION = "contamination.json"


@dataclass(frozen=True)
class EvaluationFolder:
    """A complete evaluation."""

    folder: Path
    scores: dict[str, Any]  # scores.json

    @property
    def suite(self) -> str:
        """Name of the suite."""
        return self.scores["suite"]

    @property
    def step(self) -> int | None:
        """Step of the checkpoint; None if the model is not of a run."""
        return self.scores["step"]

    @property
    def label(self) -> str:
        """The step, or else the model, for people."""
        return self.scores["model"] if self.step is None else f"step {self.step}"

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The summary of each task by name."""
        return self.scores["tasks"]

    @property
    def contamination(self) -> dict[str, dict[str, Any]]:
        """What launch/contamination.py found by task; {} if it has not run."""
        path = self.folder / CONTAMINATION
        return json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.exists() else {}

    def answers(self, task: str) -> list[Answer]:
        """Return a task's answers by question and sample."""
        return read_answers(self.folder / FOLDER / f"{task}.jsonl")


def values(answers: list[Answer], metric: str | None = None) -> dict[str, list[float]]:
    """Return a metric of the judged answers by question id; the score of answers that do not have it, and with None."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        if answer.score is not None:
            found.setdefault(answer.question, []).append(answer.metrics.get(metric or "", answer.score))
    return found


def read(folder: Path) -> EvaluationFolder | None:
    """Return the evaluation in a folder; None without scores.json. Raises RecipeError if that is malformed."""
    scores = tables.read(folder)
    if scores is None:
        return None
    if missing := [key for key in ("suite", "model", "step", "tasks", "warnings") if key not in scores]:
        raise RecipeError(Problem("run_dir", "bad-format", f"{folder / tables.SCORES} has no {missing[0]}"))
    return EvaluationFolder(folder, scores)


def of_run(run_dir: Path) -> list[EvaluationFolder]:
    """Return the complete evaluations of a run by suite and step, or the run's own if it is an evaluation."""
    folders = [run_dir, *_folders(run_dir)]
    found = [evaluation for folder in folders if (evaluation := read(folder))]
    return sorted(found, key=lambda each: (each.suite, each.step is not None, each.step or 0, str(each.folder)))


def _folders(run_dir: Path) -> Iterator[Path]:
    for depth in ("*", "*/*"):
        yield from (path.parent for path in sorted((run_dir / sources.FOLDER).glob(f"{depth}/{tables.SCORES}")))


def by_suite(evaluations: list[EvaluationFolder]) -> dict[str, list[EvaluationFolder]]:
    """Return the evaluations of each suite in the order of their steps."""
    found: dict[str, list[EvaluationFolder]] = {}
    for each in evaluations:
        found.setdefault(each.suite, []).append(each)
    return found
