"""Show the evaluations of runs: curves with intervals, scores, verdicts, and the questions whose score changed.

A page of one run compares the first and the last evaluation of a suite; a page of several runs compares their last evaluations
with the first run's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from launch.drawing.html import Html, render, table, tag
from launch.pages.chart import Chart, Mark, Series, figures
from launch.pages.document import details
from launch.pages.rollouts import shorten
from launch.runs import evaluation_folder
from launch.runs.evaluation_comparison import ChangedQuestion, TaskComparison, compare
from launch.runs.evaluation_folder import EvaluationFolder
from launch.runs.run_folder import RunFolder
from pipeline.evaluation.questions import Answer

CHANGED = 20
"""Maximum number of changed questions of a task that are shown."""
TEXT_CHARACTERS = 3_000
"""Maximum number of characters of a prompt or an answer."""
CLASSES = {"better": "good", "worse": "bad", "changed": "warn", "cannot tell": "warn"}
Suites = Mapping[str, Sequence[EvaluationFolder]]
Columns = list[tuple[str, EvaluationFolder]]
"""The evaluations of a suite that are shown, with the names of their columns."""


def evaluations(runs: Sequence[RunFolder], names: Sequence[str], marks: Sequence[Mark] = ()) -> list[Html]:
    """Return the elements about the runs' evaluations; an empty list if there are no evaluations.

    names, marks: the names of the runs and the events to mark in the curves. Raises RecipeError for a malformed scores.json.
    """
    suites_by_run = [evaluation_folder.by_suite(evaluation_folder.of_run(run.folder)) for run in runs]
    suites = list(dict.fromkeys(suite for suites_of_run in suites_by_run for suite in suites_of_run))
    content: list[Html] = []
    for suite in suites:
        content.append(tag("h3", f"Suite {suite}", class_="suite"))
        if charts := [*_curves(suites_by_run, suite, marks)]:
            content.append(figures(charts, names))
        columns = _columns(suites_by_run, names, suite)
        content += [_scores(columns), *_groups(columns), *_contamination(columns), *_warnings(columns)]
        (first, before), *later_columns = columns
        for name, after in later_columns:
            content += _comparison_tables((first, name), compare(before, after))
    return content


# ---- curves and tables ------------------------------------------------------------------------------------------------------


def _curves(suites_by_run: Sequence[Suites], suite: str, marks: Sequence[Mark]) -> Iterator[Chart]:
    """Yield a chart for each task, with the task's main metric over the steps."""
    evaluated = [[evaluation for evaluation in of.get(suite, ()) if evaluation.step is not None] for of in suites_by_run]
    for task in _tasks(evaluation for of in evaluated for evaluation in of):
        series = []
        for run, of in enumerate(evaluated):
            points = [(evaluation.step or 0, _own(evaluation.tasks[task])) for evaluation in of if task in evaluation.tasks]
            steps = [step for step, _ in points]
            columns = {end: [score.get(end) for _, score in points] for end in ("value", "low", "high")}
            if points:
                series.append(Series("95% interval", steps, (), run, "band", columns["low"], columns["high"]))
                series.append(Series("score", steps, columns["value"], run, "points"))
        yield Chart(task, series, marks=marks, note=_metric(evaluated, task))


def _scores(columns: Columns) -> Html:
    """Return a table of all metrics of all tasks."""
    rows: list[list[object]] = []
    for task in _tasks(evaluation for _, evaluation in columns):
        summaries = [evaluation.tasks.get(task) for _, evaluation in columns]
        metrics = list(dict.fromkeys(metric for summary in summaries if summary for metric in summary["metrics"]))
        for metric in metrics:
            cells = [_cell(summary["metrics"].get(metric)) if summary else "" for summary in summaries]
            counts = ", ".join(dict.fromkeys(str(summary["questions"]) for summary in summaries if summary))
            rows.append([task if metric == metrics[0] else "", metric, counts if metric == metrics[0] else "", *cells])
    return table(["task", "metric", "questions", *(name for name, _ in columns)], rows, "Scores with 95% intervals")


def _groups(columns: Columns) -> Iterator[Html]:
    for task in _tasks(evaluation for _, evaluation in columns):
        groups = dict.fromkeys(group for _, evaluation in columns for group in evaluation.tasks.get(task, {}).get("groups", {}))
        rows = [[group, *(_of_group(evaluation.tasks.get(task), group) for _, evaluation in columns)] for group in groups]
        macro = [_cell(_own(evaluation.tasks.get(task, {}), "macro")) for _, evaluation in columns]
        if rows:
            header = ["group", *(name for name, _ in columns)]
            yield details(f"{task} by group", table(header, [*rows, ["mean of the groups", *macro]]))


def _warnings(columns: Columns) -> Iterator[Html]:
    yield from _warning_list([f"{name}: {text}" for name, evaluation in columns for text in evaluation.scores["warnings"]])


def _warning_list(warnings: Sequence[str]) -> Iterator[Html]:
    if warnings:
        yield tag("ul", *(tag("li", warning, class_="warn") for warning in warnings))


def _contamination(columns: Columns) -> Iterator[Html]:
    """Yield a table of the tasks whose questions were searched for in the training data, if there are any.

    It shows their scores for all questions, for those that are not in the training data, and for those that are.
    """
    rows: list[list[object]] = []
    for name, evaluation in columns:
        for task, of in evaluation.contamination.items():
            if "scores" in of:
                scores = (_cell(of["scores"][part]) for part in ("all", "clean", "flagged"))
                rows.append([task, name, f"{of['flagged']} of {of['questions']}", *scores])
    if rows:
        header = ["task", "", "in the training data", "all questions", "without these", "only these"]
        yield table(header, rows, "Questions that occur in the training data")


def _columns(suites_by_run: Sequence[Suites], names: Sequence[str], suite: str) -> Columns:
    """Return (name, evaluation) for the evaluations to show of a suite.

    For a single run they are its first and its last evaluation, for several runs the last evaluation of each run.
    """
    if len(suites_by_run) == 1:
        of = suites_by_run[0][suite]
        return [(evaluation.label, evaluation) for evaluation in (of if len(of) == 1 else (of[0], of[-1]))]
    return [
        (f"{name}, {of[suite][-1].label}", of[suite][-1]) for name, of in zip(names, suites_by_run, strict=True) if suite in of
    ]


def _tasks(evaluated: Iterator[EvaluationFolder]) -> list[str]:
    return list(dict.fromkeys(task for evaluation in evaluated for task in evaluation.tasks))


def _metric(evaluated: Sequence[Sequence[EvaluationFolder]], task: str) -> str:
    return next((evaluation.tasks[task]["metric"] for of in evaluated for evaluation in of if task in evaluation.tasks), "")


def _own(summary: Mapping, key: str = "metrics") -> Mapping[str, float | None]:
    """Return the score of the task's main metric in a task's summary, with its interval; empty if there is none.

    key: the entry of the summary that has the scores by metric.
    """
    return summary.get(key, {}).get(summary.get("metric"), {})


def _of_group(summary: Mapping | None, group: str) -> str:
    of = (summary or {}).get("groups", {}).get(group)
    return f"{_cell(of['metrics'].get(summary['metric']))} of {of['questions']}" if summary and of else ""


def _cell(score: Mapping[str, float | None] | None) -> str:
    if not score or score.get("value") is None:
        return ""
    low, high = score["low"], score["high"]
    ends = "-" if low is None or high is None else f"{low:.3f}, {high:.3f}"
    return f"{score['value']:.3f} [{ends}]"


# ---- two evaluations --------------------------------------------------------------------------------------------------------


def _comparison_tables(names: tuple[str, str], compared: Sequence[TaskComparison]) -> Iterator[Html]:
    if not compared:
        return
    title = " → ".join(names)
    rows: list[list[object]] = []
    for comparison in compared:
        difference = comparison.difference
        verdict = tag("span", difference.verdict, class_=CLASSES[difference.verdict])
        numbers = ["", "", "", ""]
        if difference.questions:
            numbers = [
                difference.shown,
                f"{difference.p_value:.2g}",
                f"{difference.gained} / {difference.lost}",
                str(difference.questions),
            ]
        unpaired = f"{comparison.unpaired} of one only" if comparison.unpaired else ""
        rows.append([comparison.task, verdict, *numbers, unpaired])
    header = ["task", "", "difference", "p", "better / worse (or higher / lower)", "questions", ""]
    yield table(header, rows, f"{title}, question by question")
    yield from _warning_list(
        [f"{title}, {comparison.task}: {warning}" for comparison in compared for warning in comparison.warnings]
    )
    for comparison in compared:
        if comparison.changed:
            articles = [_changed_article(question, names) for question in islice(comparison.changed, CHANGED)]
            count = (
                f"{len(articles)} of {len(comparison.changed)}"
                if len(articles) < len(comparison.changed)
                else str(len(articles))
            )
            yield details(f"{comparison.task}: {count} changed questions, {title}", *articles)


def _changed_article(question: ChangedQuestion, names: tuple[str, str]) -> Html:
    """Return an element with the scores of all answers to a question, and the texts of the first ones."""
    prompts = dict.fromkeys(answer.prompt for answer in (*question.after, *question.before) if answer.prompt)  # two of a pair
    sides = [
        (name, ", ".join(map(_score, answers)), shorten(_text(answers), TEXT_CHARACTERS))
        for name, answers in zip(names, (question.before, question.after), strict=True)
    ]
    prompt = shorten("\n".join(prompts), TEXT_CHARACTERS)
    return render("pages/changed_question.html.j2", question=question, prompt=prompt, sides=sides)


def _text(answers: Sequence[Answer]) -> str:
    """Return the first answer's text, or why it has none. Of a pair of sentences, return those of both."""
    firsts = {answer.question: answer.text or answer.failure for answer in reversed(answers)}
    return "\n".join(reversed(firsts.values()))


def _score(answer: Answer) -> str:
    return "not judged" if answer.score is None else f"{answer.score:g}"
