"""Format the scores of an evaluation for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from launch.terminal.units import plural
from pipeline.files import small_files

SCORES = "scores.json"
HEADER = ("task", "metric", "score", "95% interval", "questions", "samples", "truncated", "unparsed")
NUMBERS = (2, 4, 5, 6, 7)  # columns that are aligned to the right
MEND = "Try to restore it from a copy, or to delete it and evaluate again: the answers that exist are used again"


class MetricScore(TypedDict):
    """The value of a metric, with the ends of its 95% interval if these are known."""

    value: float | None
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class GroupScores(TypedDict):
    """The scores of one group of a task's questions."""

    questions: int
    metrics: dict[str, MetricScore]


class TaskScores(TypedDict):
    """A task of scores.json."""

    metric: str
    metrics: dict[str, MetricScore]
    questions: int
    samples: int
    truncated: NotRequired[float | None]
    unparsed: NotRequired[float | None]
    unjudged: NotRequired[int]
    groups: NotRequired[dict[str, GroupScores]]
    macro: NotRequired[dict[str, MetricScore]]


class Scores(TypedDict):
    """scores.json, as pipeline/evaluation/scores.py writes it."""

    suite: str
    model: str
    step: int | None
    tasks: dict[str, TaskScores]
    warnings: list[str]
    run: NotRequired[str | None]


def read(run_dir: Path) -> dict[str, Any] | None:
    """Return an evaluation's scores.json; None if it has none yet. Raises RecipeError for a damaged file."""
    scores = small_files.read(run_dir / SCORES, Scores, "run_dir", MEND)
    return dict(scores) if scores is not None else None


def lines(scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each metric of each task, in aligned columns, then the warnings. scores: the content of scores.json."""
    rows: list[Sequence[str]] = [HEADER]
    for name, task in scores["tasks"].items():
        rows += _rows(name, task)
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = (f"{cell:{'>' if i in NUMBERS else '<'}{widths[i]}s}" for i, cell in enumerate(row))
        yield "  ".join(cells).rstrip()
    for name, task in scores["tasks"].items():
        if task.get("unjudged"):
            yield f"{name}: {plural(task['unjudged'], 'answer')} not judged; the same command asks the judge again"
    for warning in scores.get("warnings", ()):
        yield f"warning: {warning}"


def _rows(name: str, task: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row for each metric of a task, its main metric first. Only the first row has the task's name and counts."""
    metrics = dict(task["metrics"])
    main = {task["metric"]: metrics.pop(task["metric"])} if task.get("metric") in metrics else {}
    about = (f"{task['questions']:,}", f"{task['samples']:,}", _share(task.get("truncated")), _share(task.get("unparsed")))
    for metric, value in {**main, **metrics}.items():
        yield name, metric, _number(value["value"]), _interval(value) or "-", *about
        name, about = "", ("", "", "", "")


def main_scores(scores: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Return task -> {value, low, high} of its main metric."""
    return {
        name: task["metrics"][task["metric"]]
        for name, task in scores["tasks"].items()
        if task.get("metric") in task.get("metrics", {})
    }


def short(scores: Mapping[str, Any]) -> str:
    """Return one line with the main metric of each task."""
    main = main_scores(scores).items()
    return ", ".join(f"{name} {_number(of['value'])}{f' ({ends})' if (ends := _interval(of)) else ''}" for name, of in main)


def _interval(value: Mapping[str, Any]) -> str:
    low, high = value.get("low"), value.get("high")
    return "" if low is None or high is None else f"{_number(low)} to {_number(high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
