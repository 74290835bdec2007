"""Compute an evaluation's scores from its answers alone, and write scores.json.

    {"suite", "model", "run", "step",               run, step: of the training run whose checkpoint was evaluated, or null
     "tasks": {TASK: {"kind", "metric",             the metric that stands for the task
                      "questions", "samples",       samples: judged answers
                      "truncated", "unparsed",      shares of answers cut by the token limit, and without a parsed answer
                      "unjudged",                   number of answers without a score, which no metric counts
                      "dropped",                    number of records left out by data.bad_records=drop
                      "metrics": {METRIC: {"value", "low", "high"}},
                      "groups": {GROUP: {"questions", "metrics": {METRIC: ...}}},
                      "macro": {METRIC: ...}}},     means over groups; absent if there are no groups
     "warnings": [...]}

low and high are the ends of a 95% interval, null if it cannot be known. values.json has the values from which the scores are
computed, for comparisons: {TASK: {METRIC: {QUESTION: [values]}}}. The order of the answers does not matter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Recipe
from pipeline.evaluation.questions import Answer, PerQuestion
from pipeline.evaluation.statistics import Interval, Scale, interval, macro_interval
from pipeline.files.storage import write_durably

if TYPE_CHECKING:
    from pipeline.evaluation.task import Task

logger = logging.getLogger(__name__)

FILE = "scores.json"
VALUES = "values.json"
WARN_SHARE = 0.01
"""A warning is given if a larger share of the answers is truncated, or if the parser finds no answer in a larger share."""


def summarize(recipe: Recipe, tasks: Mapping[str, tuple[Task, Sequence[Answer]]]) -> dict[str, Any]:
    """Return the contents of scores.json: the scores of each task with their intervals, and warnings."""
    summaries, warnings = {}, []
    for name, (task, answers) in tasks.items():
        final = latest(answers)
        summaries[name] = _task(task, final)
        warnings += [f"{name}: {warning}" for warning in _warnings(task, final, summaries[name])]
    return {
        "suite": recipe.name,
        "model": recipe.policy.model_name,
        "run": recipe.evaluate.run,
        "step": recipe.evaluate.step,
        "tasks": summaries,
        "warnings": warnings,
    }


def values(tasks: Mapping[str, tuple[Task, Sequence[Answer]]]) -> dict[str, dict[str, PerQuestion]]:
    """Return the contents of values.json."""
    return {name: task.metrics(latest(answers)) for name, (task, answers) in tasks.items()}


def write(run_dir: Path, scores: Mapping[str, Any], values: Mapping[str, Mapping[str, PerQuestion]]) -> Path:
    """Write values.json and then scores.json into the evaluation's folder. Return the path of scores.json. Raises OSError."""
    write_durably(run_dir / VALUES, json.dumps(values))
    path = run_dir / FILE
    write_durably(path, json.dumps(scores, indent=1, allow_nan=False) + "\n")
    return path


def show(scores: Mapping[str, Any]) -> None:
    """Write the scores as TensorBoard events of the evaluated step, to tensorboard/evaluations/SUITE in the training run.

    Do nothing for an evaluation without a run or a step. A failure to write is only logged, since scores.json has the scores.
    """
    if scores["run"] is None or scores["step"] is None or not Path(scores["run"]).is_dir():
        return
    from pipeline.observe.tensorboard_writer import write_events  # only rank 0 needs the package

    values = {}
    for task, summary in scores["tasks"].items():
        for metric, estimate in summary["metrics"].items():
            named = {"": estimate["value"], "_low": estimate["low"], "_high": estimate["high"]}
            values |= {f"{task}/{metric}{end}": value for end, value in named.items() if value is not None}
    folder = Path(scores["run"]) / "tensorboard" / "evaluations" / scores["suite"]
    try:
        write_events(folder, scores["step"], values)
    except OSError as error:
        logger.warning(f"cannot write the scores of step {scores['step']} for TensorBoard: {folder}: {error}")


def latest(answers: Sequence[Answer]) -> list[Answer]:
    """Return one answer for each question and sample, in their order. A judged answer precedes an unjudged one."""
    by_sample: dict[tuple[str, int], Answer] = {}
    for answer in answers:
        sample = answer.question, answer.sample
        by_sample[sample] = min(by_sample[sample], answer, key=_rank) if sample in by_sample else answer
    return [by_sample[sample] for sample in sorted(by_sample)]


def _rank(answer: Answer) -> tuple[bool, str]:
    return answer.score is None, json.dumps(asdict(answer))


def _task(task: Task, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the entry of a task in scores.json. answers: the result of `latest`."""
    metrics, scales = task.metrics(answers), scales_of(task)
    groups = {answer.question: answer.group for answer in answers if answer.group}
    summary = {
        "kind": task.config.kind,
        "metric": task.config.metric or next(iter(metrics), ""),
        "questions": len({answer.question for answer in answers}),
        "samples": sum(answer.score is not None for answer in answers),
        "truncated": _share([answer.finish == "length" for answer in answers]),
        "unparsed": _share([answer.metrics.get("unparsed", 0.0) > 0 for answer in answers if answer.score is not None]),
        "unjudged": sum(answer.score is None for answer in answers),
        "dropped": getattr(task, "dropped", 0),
        "metrics": {name: as_json(interval(values.values(), scales.get(name))) for name, values in metrics.items()},
        "groups": {},
    }
    if groups:
        # Of each group's own answers: some metrics weigh a question by all questions that they are given.
        by_group = {
            name: task.metrics([answer for answer in answers if answer.group == name]) for name in sorted(set(groups.values()))
        }
        summary["groups"] = {
            name: {
                "questions": sum(group == name for group in groups.values()),
                "metrics": {
                    metric: as_json(interval(values.values(), scales.get(metric))) for metric, values in group_metrics.items()
                },
            }
            for name, group_metrics in by_group.items()
        }
        summary["macro"] = {
            metric: as_json(
                macro_interval(
                    [group_metrics[metric].values() for group_metrics in by_group.values() if metric in group_metrics],
                    scales.get(metric),
                )
            )
            for metric in metrics
            if any(metric in group_metrics for group_metrics in by_group.values())
        }
    return summary


def scales_of(task: object) -> Mapping[str, Scale]:
    """Return metric -> scale, for the metrics whose interval needs one. {} for a task without `scales`."""
    return getattr(task, "scales", {})


def _warnings(task: Task, answers: Sequence[Answer], summary: Mapping[str, Any]) -> Iterator[str]:
    config = task.config
    yield from task.warnings
    if summary["truncated"] > WARN_SHARE:
        limit = f"the limit of {config.max_new_tokens} tokens (max_new_tokens)"
        yield f"{summary['truncated']:.1%} of the answers were cut by {limit}"
    if summary["unparsed"] > WARN_SHARE:
        yield f"the parser found no answer in {summary['unparsed']:.1%} of the responses"
    if summary["unjudged"]:
        yield f"{summary['unjudged']} of {len(answers)} answers could not be judged and do not count"
    if missing := max(0, summary["questions"] * config.num_samples - len(answers)):
        yield f"{missing} of {summary['questions'] * config.num_samples} answers are missing"
    if config.data.max_samples is not None and summary["questions"] >= config.data.max_samples:
        yield f"{summary['questions']} questions were drawn from the data (max_samples); the whole data may score differently"
    if not answers:
        yield "has no answer"
    elif summary["metric"] not in summary["metrics"]:
        yield f"has no metric '{summary['metric']}'; it has {', '.join(summary['metrics']) or 'none'}"


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def as_json(estimate: Interval) -> dict[str, float | None]:
    """Return {"value", "low", "high"} of an interval, with None in place of NaN."""
    return {key: None if math.isnan(value) else value for key, value in asdict(estimate).items()}
