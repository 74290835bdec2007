"""Read the evaluations of a run: the files scores.json, values.json and answers/TASK.jsonl of each evaluation.

RUN_DIR/evaluations/SUITE/step_000050/     an evaluation of a checkpoint of the run
RUN_DIR/                                   the run itself, if it is an evaluation
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from launch.runs import evaluation_sources, run_keys, score_tables
from pipeline.config import RecipeError
from pipeline.evaluation.answers import FOLDER, read_answers
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.scores import VALUES
from pipeline.files import small_files

CONTAMINATION = "contamination.json"


class _CleanScores(TypedDict):
    all: score_tables.MetricScore
    clean: score_tables.MetricScore
    flagged: score_tables.MetricScore


class _SearchedTask(TypedDict):
    """A task of contamination.json. It has no `scores` if its questions cannot be read."""

    flagged: NotRequired[int]
    questions: NotRequired[int]
    scores: NotRequired[_CleanScores]


class _Contamination(TypedDict):
    tasks: dict[str, _SearchedTask]


@dataclass(frozen=True)
class EvaluationFolder:
    """A complete evaluation."""

    folder: Path
    scores: dict[str, Any]  # scores.json

    @property
    def suite(self) -> str:
        """Return the suite's name."""
        return self.scores["suite"]

    @property
    def step(self) -> int | None:
        """Return the checkpoint's step; None if the model is not a run's."""
        return self.scores["step"]

    @property
    def label(self) -> str:
        """Return a text that names the checkpoint's step, or else the model."""
        return self.scores["model"] if self.step is None else f"step {self.step}"

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return task name -> its summary in scores.json."""
        return self.scores["tasks"]

    @property
    def contamination(self) -> dict[str, dict[str, Any]]:
        """Return task name -> the findings of launch/contamination.py; {} if it has not run."""
        findings = small_files.read(self.folder / CONTAMINATION, _Contamination)
        return {name: dict(task) for name, task in findings["tasks"].items()} if findings else {}

    def values(self, task: str, metric: str | None = None) -> dict[str, list[float]]:
        """Return question -> its values of a metric; {} if the task does not have the metric.

        metric: None means the task's main metric.

        Raises RecipeError for an evaluation without values.json.
        """
        return self._values.get(task, {}).get(metric or self.tasks[task]["metric"], {})

    @cached_property
    def _values(self) -> dict[str, dict[str, dict[str, list[float]]]]:
        path = self.folder / VALUES
        if (
            values := small_files.read(path, dict[str, dict[str, dict[str, list[float]]]], "run_dir", score_tables.MEND)
        ) is None:
            raise small_files.damaged(path, "no such file", "the values of each question", "run_dir", score_tables.MEND)
        return values

    def settings(self, task: str) -> dict[str, Any]:
        """Return a task's section of recipe.yaml; {} if the file cannot be read."""
        try:
            section = small_files.read_yaml(self.folder / "recipe.yaml")["evaluate"]
            tasks = section.get("tasks") or {}
            return tasks[task] if task in tasks else section.get("lm_eval") or {}
        except (OSError, RecipeError, KeyError, TypeError, AttributeError):
            return {}

    def answers(self, task: str) -> list[Answer]:
        """Return a task's answers, sorted by question and sample. Raises RecipeError if their encryption key is not here."""
        return read_answers(self.folder / FOLDER / f"{task}.jsonl", run_keys.source(self.folder))


def read(folder: Path) -> EvaluationFolder | None:
    """Return the evaluation in a folder; None without scores.json. Raises RecipeError if that is malformed."""
    scores = score_tables.read(folder)
    if scores is None:
        return None
    return EvaluationFolder(folder, scores)


def of_run(run_dir: Path) -> list[EvaluationFolder]:
    """Return a run's complete evaluations, sorted by suite and step; only the run itself if it is an evaluation."""
    folders = [run_dir, *_folders(run_dir)]
    evaluations = [evaluation for folder in folders if (evaluation := read(folder))]

    def order(evaluation: EvaluationFolder) -> tuple[str, bool, int, str]:
        return evaluation.suite, evaluation.step is not None, evaluation.step or 0, str(evaluation.folder)

    return sorted(evaluations, key=order)


def _folders(run_dir: Path) -> Iterator[Path]:
    for depth in ("*", "*/*"):
        yield from (
            path.parent for path in sorted((run_dir / evaluation_sources.FOLDER).glob(f"{depth}/{score_tables.SCORES}"))
        )


def by_suite(evaluations: list[EvaluationFolder]) -> dict[str, list[EvaluationFolder]]:
    """Return suite -> its evaluations in the order of their steps."""
    by_suite_name: dict[str, list[EvaluationFolder]] = {}
    for evaluation in evaluations:
        by_suite_name.setdefault(evaluation.suite, []).append(evaluation)
    return by_suite_name
