"""Write a sweep's report as an HTML page: failed gates with their curves, all gates, all curves, the runs and their failures.

A chart shows each seed, the range of all seeds, and the baseline's mean with its standard deviation.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Literal

from launch.drawing.html import Html, table, tag
from launch.pages.chart import Chart, Series, figures
from launch.pages.document import Section, details, document
from launch.sweeps import expressions
from launch.sweeps import suite as suites
from launch.sweeps.baseline import StoredCurve
from launch.sweeps.expressions import Curve, Statistic
from launch.sweeps.gates import GateResult, Verdict
from launch.sweeps.measurements import by_step
from launch.sweeps.verdict import JobResult, SweepResult, baseline_of, main_line, metrics_of

RUNS = ("this sweep", "baseline")
NOW, BEFORE = 0, 1  # indices in RUNS
CLASSES = {GateResult.PASSED: "good", GateResult.FAILED: "bad", GateResult.NOT_JUDGED: "warn"}
SECONDS = re.compile(r"time/")


def page(result: SweepResult) -> str:
    """Return the report's HTML."""
    verdict = tag("span", "passed" if result.passed else "failed", class_="good" if result.passed else "bad")
    commits = " and ".join(result.commits) or "unknown"
    intro = tag("p", verdict, f" · {result.summary} · judged {result.judged} · commit {commits} · {baseline_of(result)}")
    sections = [*_failures(result), *_notes(result), _gates(result), *_curves(result), _runs(result), _suite(result)]
    return document(result.title, sections, RUNS, intro)


def _failures(result: SweepResult) -> Iterator[Section]:
    if not result.failed:
        return
    rows: list[list[object]] = [[verdict.run, verdict.gate, verdict.message, _seeds(verdict)] for verdict in result.failed]
    broken = {(verdict.run, verdict.gate) for verdict in result.failed}
    charts = []
    for run in result.sweep.suite.runs:
        cases = [case for case in result.sweep.cases(run) if (run, case.name) in broken]
        charts += [_chart(result, run, metric, f"{run}: {metric}") for metric in metrics_of(cases)]
    content = [table(["run", "gate", "found and expected", "seeds"], rows)]
    yield Section("Failed", [*content, *([figures(charts, RUNS)] if charts else [])])


def _notes(result: SweepResult) -> Iterator[Section]:
    if result.notes:
        yield Section("Notes", [tag("ul", *(tag("li", note) for note in result.notes))])


def _gates(result: SweepResult) -> Section:
    rows = [
        [row.run, row.gate, tag("span", row.outcome.value, class_=CLASSES[row.outcome]), row.message, _seeds(row)]
        for row in result.verdicts
    ]
    return Section("Gates", [table(["run", "gate", "", "found and expected", "seeds"], rows)])


def _seeds(verdict: Verdict) -> str:
    return ", ".join(f"{seed}: {value:.4g}" for seed, value in verdict.values.items())


# ---- curves -------------------------------------------------------------------------------------------------------------


def _curves(result: SweepResult) -> Iterator[Section]:
    note = "Each seed, the band of all seeds, and the baseline's mean with its standard deviation."
    for run in result.sweep.suite.runs:
        charts = [_chart(result, run, metric, metric) for metric in metrics_of(result.sweep.cases(run))]
        if charts:
            yield Section(run, [figures(charts, RUNS)], note)


def _chart(result: SweepResult, run: str, metric: str, title: str) -> Chart:
    seeds = {seed: m.curves[metric] for seed, m in sorted(result.sweep.runs[run].items()) if metric in m.curves}
    stored = result.sweep.baseline.of(run).curves.get(metric) if result.sweep.baseline else None
    series = [*_before(stored)] if stored and stored.steps else []
    series += [_band(seeds)] if len(seeds) > 1 else []
    series += [Series(f"seed {seed}", curve.steps, curve.values, NOW, _kind(curve)) for seed, curve in seeds.items()]
    unit = "s" if SECONDS.match(metric) else ""
    return Chart(title, series, unit, levels=_levels(result, run, metric), note="" if series else "no run has this metric")


def _kind(curve: Curve) -> Literal["line", "points"]:
    """Return how to draw a curve: `points` if it has values at few steps, else `line`."""
    gaps = [after - before for before, after in zip(curve.steps, curve.steps[1:], strict=False)]
    return "points" if not gaps or statistics.median(gaps) > 1 else "line"


def _band(seeds: dict[int, Curve]) -> Series:
    values_by_step = by_step(seeds.values())
    low, high = [min(values) for values in values_by_step.values()], [max(values) for values in values_by_step.values()]
    return Series("all seeds", [*values_by_step], (), NOW, "band", low, high)


def _before(stored: StoredCurve) -> Iterator[Series]:
    low = [mean - spread for mean, spread in zip(stored.mean, stored.spread, strict=True)]
    high = [mean + spread for mean, spread in zip(stored.mean, stored.spread, strict=True)]
    yield Series("mean", stored.steps, stored.mean, BEFORE, "band", low, high)


def _levels(result: SweepResult, run: str, metric: str) -> list[tuple[float, str]]:
    """Return (value, label) of each limit to draw in a metric's chart: those of gates on a single statistic of the metric."""
    judged = {verdict.gate: verdict for verdict in result.verdicts if verdict.run == run}
    levels = []
    for case in result.sweep.cases(run):
        expression = expressions.parse(case.gate.value) if case.gate.value else None
        if isinstance(expression, Statistic) and expression.metric == metric and not case.relative_to:
            limits = judged[case.name].limits
            ends = (("min", limits.low), ("max", limits.high))
            levels += [(end, f"{case.name}: {name}") for name, end in ends if end is not None]
    return levels


# ---- the runs -----------------------------------------------------------------------------------------------------------


def _runs(result: SweepResult) -> Section:
    rows = [
        [ran.job.name, _state(ran), ran.tries, ran.restarts, f"{ran.seconds:.0f}", _hardware(result, ran)] for ran in result.ran
    ]
    failures = [
        details(f"{ran.job.name}, try {number}: {main_line(lines)}", tag("pre", "\n".join(lines)))
        for ran in result.ran
        for number, lines in enumerate(ran.why, 1)
    ]
    return Section("Runs", [table(["run", "", "tries", "restarts", "seconds", "hardware"], rows), *failures])


def _state(ran: JobResult) -> Html:
    if ran.state == "done" and ran.tries > 1:
        return tag("span", "retried", class_="warn")
    return tag("span", ran.state, class_="good" if ran.state == "done" else "bad")


def _hardware(result: SweepResult, ran: JobResult) -> str:
    if ran.job.run is None or ran.job.seed is None:
        return ""
    measured = result.sweep.runs.get(ran.job.run, {}).get(ran.job.seed)
    return (measured and measured.hardware) or ""


def _suite(result: SweepResult) -> Section:
    return Section("Suite", [details("suite.yaml, resolved", tag("pre", suites.to_yaml(result.sweep.suite)))])
