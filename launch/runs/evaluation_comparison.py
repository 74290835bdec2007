"""Compare two evaluations question by question: verdicts of paired tests, and the questions whose score changed."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from launch.runs.evaluation_folder import EvaluationFolder
from launch.terminal.units import plural
from pipeline.evaluation.formats.bias_benchmarks import pair_of
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.statistics import Difference, difference

LOWER_IS_BETTER = re.compile(r"(perplexity|bits_per_byte|harmless_refused|losses|unparsed|likelihood_diff)$")
NO_DIRECTION = re.compile(r"(bias_score|pct_stereotype|acc_gap)$")
"""Scores of a bias to either side, whose neutral value is 0 or 0.5: neither a higher nor a lower one is better."""

SETTINGS = (
    *("num_samples", "temperature", "top_p", "top_k", "max_new_tokens"),
    *("num_few_shot", "few_shot_choice", "few_shot_as_turns", "format", "format_kwargs"),
    *("num_fewshot", "fewshot_as_multiturn", "gen_kwargs", "max_gen_toks"),  # of lm-evaluation-harness
)
"""Settings of a task on which its scores depend."""


@dataclass(frozen=True)
class ChangedQuestion:
    """A question with different scores in two evaluations, or a pair of sentences with all answers to both."""

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
        """Return the verdict as one line."""
        difference = self.difference
        if not difference.questions:
            return "no question in common"
        gained, lost = ("higher", "lower") if difference.lower_is_better is None else ("better", "worse")
        moved = f"{difference.gained} questions {gained}, {difference.lost} {lost}, of {difference.questions}"
        return f"{difference.verdict}: {difference.shown}, p = {difference.p_value:.2g}; {moved}"


def compare(before: EvaluationFolder, after: EvaluationFolder) -> list[TaskComparison]:
    """Return a comparison of each task that both evaluations have, in the order of the first evaluation."""
    return [compare_task(before, after, task) for task in before.tasks if task in after.tasks]


def compare_task(before: EvaluationFolder, after: EvaluationFolder, task: str, metric: str | None = None) -> TaskComparison:
    """Return the comparison of one task. metric: the metric to compare; None: the task's main metric."""
    metric = metric or str(before.tasks[task]["metric"])
    first, second = before.values(task, metric), after.values(task, metric)
    changes = {question: _mean(second[question]) - _mean(first[question]) for question in first.keys() & second.keys()}
    moved = [question for question, change in changes.items() if change]
    moved.sort(key=lambda question: (-abs(changes[question]), question))
    by_question = [_by_question(folder.answers(task), changes) if moved else {} for folder in (before, after)]
    changed_questions = [
        ChangedQuestion(question, by_question[0][question], by_question[1][question], changes[question]) for question in moved
    ]
    task_difference = difference(first, second, is_lower_better(metric), exponential=metric.endswith("perplexity"))
    unpaired = len(first.keys() ^ second.keys())
    warnings = [*_warnings(before, after, task, task_difference, unpaired)]
    return TaskComparison(task, metric, task_difference, changed_questions, unpaired, warnings)


def _warnings(
    before: EvaluationFolder, after: EvaluationFolder, task: str, task_difference: Difference, unpaired: int
) -> Iterator[str]:
    """Yield a warning for each reason why two evaluations of a task can hardly be compared."""
    if unpaired:
        yield f"{task_difference.questions} of {plural(task_difference.questions + unpaired, 'question')} in common"
    first, second = before.settings(task), after.settings(task)
    for key in SETTINGS:
        if key in first and key in second and first[key] != second[key]:
            yield f"{key} differs: {_setting(first[key])} and {_setting(second[key])}"


def is_lower_better(metric: str) -> bool | None:
    """Return whether a lower value of a metric is better; None if neither a lower nor a higher one is."""
    return None if NO_DIRECTION.search(metric) else LOWER_IS_BETTER.search(metric) is not None


def _setting(value: object) -> str:
    return "null" if value is None else str(value)


def _by_question(answers: Sequence[Answer], questions: Container[str]) -> dict[str, list[Answer]]:
    """Return question -> its answers. A value of a pair of sentences (`pair_of`) has the answers to both."""
    by_question: dict[str, list[Answer]] = {}
    for answer in answers:
        question = answer.question if answer.question in questions else pair_of(answer.question)
        by_question.setdefault(question, []).append(answer)
    return by_question


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
