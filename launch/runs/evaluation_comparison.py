"""Compare two evaluations question by question: verdicts of paired tests, and the questions whose score changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.runs.evaluation_folder import EvaluationFolder
from launch.terminal.units import plural
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.statistics import Difference, difference

LOWER_IS_BETTER = re.compile(r"(perplexity|bits_per_byte|harmless_refused|losses|unparsed)$")

SETTINGS = (
    *("num_samples", "temperature", "top_p", "top_k", "max_new_tokens"),
    *("num_few_shot", "few_shot_choice", "few_shot_as_turns", "format", "format_kwargs"),
    *("num_fewshot", "fewshot_as_multiturn", "gen_kwargs", "max_gen_toks"),  # of lm-evaluation-harness
)
"""Settings of a task with which its scores change."""


@dataclass(frozen=True)
class ChangedQuestion:
    """A question with different scores in two evaluations."""

    question: str
    before: Sequence[Answer]
    after: Sequence[Answer]
    change: float  # of the mean over the samples


@dataclass(frozen=True)
class TaskComparison:
    """A task in two evaluations."""

    task: str
    metric: str
    difference: Difference  # of the second evaluation above the first
    changed: Sequence[ChangedQuestion]  # the largest changes first
    unpaired: int  # questions that only one evaluation has
    warnings: Sequence[str] = ()

    @property
    def summary(self) -> str:
        """The verdict in a line."""
        found = self.difference
        if not found.questions:
            return "no question in common"
        moved = f"{found.gained} questions better, {found.lost} worse, of {found.questions}"
        return f"{found.verdict}: {found.shown}, p = {found.p_value:.2g}; {moved}"


def compare(before: EvaluationFolder, after: EvaluationFolder) -> list[TaskComparison]:
    """Return a comparison of each task that both evaluations have, in the first one's order."""
    return [compare_task(before, after, task) for task in before.tasks if task in after.tasks]


def compare_task(before: EvaluationFolder, after: EvaluationFolder, task: str, metric: str | None = None) -> TaskComparison:
    """Return a comparison of one task. metric: None: the task's own."""
    metric = metric or str(before.tasks[task]["metric"])
    first, second = before.values(task, metric), after.values(task, metric)
    changes = {question: _mean(second[question]) - _mean(first[question]) for question in first.keys() & second.keys()}
    moved = sorted((question for question, change in changes.items() if change), key=lambda each: (-abs(changes[each]), each))
    by_question = [_by_question(each.answers(task)) for each in (before, after)] if moved else [{}, {}]
    changed = [ChangedQuestion(each, by_question[0][each], by_question[1][each], changes[each]) for each in moved]
    found = difference(first, second, is_lower_better(metric), exponential=metric.endswith("perplexity"))
    unpaired = len(first.keys() ^ second.keys())
    return TaskComparison(task, metric, found, changed, unpaired, [*_warnings(before, after, task, found, unpaired)])


def _warnings(before: EvaluationFolder, after: EvaluationFolder, task: str, found: Difference, unpaired: int) -> Iterator[str]:
    """Yield why two evaluations of a task can hardly be compared."""
    if unpaired:
        yield f"{found.questions} of {plural(found.questions + unpaired, 'question')} in common"
    first, second = before.settings(task), after.settings(task)
    for key in SETTINGS:
        if key in first and key in second and first[key] != second[key]:
            yield f"{key} differs: {_setting(first[key])} and {_setting(second[key])}"


def is_lower_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better."""
    return LOWER_IS_BETTER.search(metric) is not None


def _setting(value: object) -> str:
    return "null" if value is None else str(value)


def _by_question(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        found.setdefault(answer.question, []).append(answer)
    return found


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
