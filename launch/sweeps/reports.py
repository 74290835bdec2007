"""Write a sweep's report: Markdown, JUnit XML for CI tools, and an HTML page with curves.

The page shows failed gates with their curves, all gates, all curves, the runs and their failures. A chart shows each seed, the
range of all seeds, and the baseline's mean with its standard deviation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Literal
from xml.etree import ElementTree

from launch.drawing.html import Html, table, tag
from launch.pages.chart import Chart, Series, figures
from launch.pages.document import Section, add_plotly, details, document
from launch.sweeps import suite as suites
from launch.sweeps import verdict as verdicts
from launch.sweeps.baseline import StoredCurve
from launch.sweeps.expressions import Curve, Expression
from launch.sweeps.gates import GateResult, Verdict
from launch.sweeps.measurements import by_step
from launch.sweeps.submission import main_line
from launch.sweeps.verdict import JobResult, SweepResult
from pipeline.files.storage import write_durably

SIGNS = {GateResult.PASSED: "✅", GateResult.FAILED: "❌", GateResult.NOT_JUDGED: "⚠️ not judged"}
CLASSES = {GateResult.PASSED: "good", GateResult.FAILED: "bad", GateResult.NOT_JUDGED: "warn"}
RUNS = ("this sweep", "baseline")
NOW, BEFORE = 0, 1  # indices in RUNS


def write(result: SweepResult) -> None:
    """Write all reports into the sweep's folder; last verdict.json, which marks the sweep as complete."""
    write_durably(result.folder / "junit.xml", junit(result))
    write_durably(result.folder / "report.md", markdown(result))
    write_durably(result.folder / "report.html", page(result))
    add_plotly(result.folder)
    verdicts.write(result)


# ---- Markdown -----------------------------------------------------------------------------------------------------------


def markdown(result: SweepResult) -> str:
    """Return the report as Markdown: failed gates, all gates, the runs."""
    parts = [f"# {result.title}: {'passed' if result.passed else 'failed'}", "", f"{result.summary}."]
    failed = [f"- **{verdict.run}, {verdict.gate}**: {_plain(verdict.message)}" for verdict in result.failed]
    gates = [(row.run, row.gate, SIGNS[row.outcome], row.message) for row in result.verdicts]
    runs = [(*_ran(ran), "; ".join(map(main_line, ran.why))) for ran in result.ran]
    sections = {
        "Failed": failed,
        "Notes": [f"- {_plain(note)}" for note in result.notes],
        "Gates": _table(("run", "gate", "", "found and expected"), gates),
        "Runs": _table(("run", "", "tries", "restarts", "seconds", "failures"), runs),
    }
    for title, lines in sections.items():
        parts += ["", f"## {title}", "", *lines] if lines else []
    parts += ["", f"Evaluated {result.judged}, commit {' and '.join(result.commits) or 'unknown'}; {result.baseline}."]
    return "\n".join([*parts, ""])


def _ran(ran: JobResult) -> tuple[str, ...]:
    return ran.job.name, ran.state, str(ran.tries), str(ran.restarts), f"{ran.seconds:.0f}"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """Return a text on one line, with Markdown characters escaped."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")


# ---- JUnit --------------------------------------------------------------------------------------------------------------


def junit(result: SweepResult) -> str:
    """Return JUnit XML with a test suite for each run and a test case for each gate: https://github.com/testmoapp/junitxml."""
    name = result.sweep.suite.name
    root = ElementTree.Element("testsuites", _counts(f"{name} {result.folder.name}", result.verdicts, result.ran))
    for run in dict.fromkeys(verdict.run for verdict in result.verdicts):
        cases = [verdict for verdict in result.verdicts if verdict.run == run]
        ran = [outcome for outcome in result.ran if (outcome.job.run or outcome.job.name) == run]
        suite = ElementTree.SubElement(root, "testsuite", {**_counts(f"{name}.{run}", cases, ran), "timestamp": result.judged})
        pairs = [("commit", commit) for commit in result.commits]
        pairs += [("retried", outcome.job.name) for outcome in ran if outcome.tries > 1]
        pairs += [("restarts", f"{outcome.job.name}: {outcome.restarts}") for outcome in ran if outcome.restarts]
        if pairs:
            properties = ElementTree.SubElement(suite, "properties")
            for key, value in pairs:
                ElementTree.SubElement(properties, "property", {"name": key, "value": value})
        for verdict in cases:
            _case(suite, name, verdict, ran)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(name: str, cases: list[Verdict], ran: list[JobResult]) -> dict[str, str]:
    failed = sum(verdict.outcome is GateResult.FAILED for verdict in cases)
    skipped = sum(verdict.outcome is GateResult.NOT_JUDGED for verdict in cases)
    counts = {"tests": len(cases), "failures": failed, "errors": 0, "skipped": skipped}
    seconds = sum(outcome.seconds for outcome in ran)
    return {"name": name, **{key: str(value) for key, value in counts.items()}, "time": f"{seconds:.3f}"}


def _case(suite: ElementTree.Element, name: str, verdict: Verdict, ran: list[JobResult]) -> None:
    job = next((outcome for outcome in ran if outcome.gate == verdict.gate), None)
    attributes = {"classname": f"{name}.{verdict.run}", "name": verdict.gate, "time": f"{job.seconds if job else 0.0:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    message = verdict.message
    values = "\n".join(f"seed {seed}: {value!r}" for seed, value in verdict.values.items())
    if verdict.outcome is GateResult.FAILED:
        failure = ElementTree.SubElement(case, "failure", {"message": message, "type": "gate"})
        lines = "\n\n".join("\n".join(attempt) for attempt in (job.why if job else []))
        failure.text = "\n".join(filter(None, (message, values, lines)))
    elif verdict.outcome is GateResult.NOT_JUDGED:
        ElementTree.SubElement(case, "skipped", {"message": message})
    else:
        ElementTree.SubElement(case, "system-out").text = "\n".join(filter(None, (message, values)))


# ---- HTML ---------------------------------------------------------------------------------------------------------------


def page(result: SweepResult) -> str:
    """Return the report's HTML."""
    verdict = tag("span", "passed" if result.passed else "failed", class_="good" if result.passed else "bad")
    commits = " and ".join(result.commits) or "unknown"
    intro = tag("p", verdict, f" · {result.summary} · judged {result.judged} · commit {commits} · {result.baseline}")
    rows = [
        [row.run, row.gate, tag("span", row.outcome.value, class_=CLASSES[row.outcome]), row.message, _seeds(row)]
        for row in result.verdicts
    ]
    sections = [*_failures(result)]
    sections += [Section("Notes", [tag("ul", *(tag("li", note) for note in result.notes))])] if result.notes else []
    sections += [Section("Gates", [table(["run", "gate", "", "found and expected", "seeds"], rows)]), *_curves(result)]
    return document(result.title, [*sections, _runs(result), suite_section(result.sweep.suite)], RUNS, intro)


def suite_section(suite: suites.Suite) -> Section:
    """Return the section of a page that shows the suite."""
    return Section("Suite", [details("suite.yaml, resolved", tag("pre", suites.to_yaml(suite)))])


def _failures(result: SweepResult) -> Iterator[Section]:
    if not result.failed:
        return
    rows = [[verdict.run, verdict.gate, verdict.message, _seeds(verdict)] for verdict in result.failed]
    broken = {(verdict.run, verdict.gate) for verdict in result.failed}
    charts = []
    for run in result.sweep.suite.runs:
        metrics = [metric for case in result.sweep.cases(run) if (run, case.name) in broken for metric in case.metrics]
        charts += [_chart(result, run, metric, f"{run}: {metric}") for metric in dict.fromkeys(metrics)]
    content = [table(["run", "gate", "found and expected", "seeds"], rows)]
    yield Section("Failed", [*content, *([figures(charts, RUNS)] if charts else [])])


def _seeds(verdict: Verdict) -> str:
    return ", ".join(f"{seed}: {value:.4g}" for seed, value in verdict.values.items())


def _curves(result: SweepResult) -> Iterator[Section]:
    note = "Each seed, the band of all seeds, and the baseline's mean with its standard deviation."
    for run in result.sweep.suite.runs:
        metrics = dict.fromkeys(metric for case in result.sweep.cases(run) for metric in case.metrics)
        if metrics:
            yield Section(run, [figures([_chart(result, run, metric, metric) for metric in metrics], RUNS)], note)


def _chart(result: SweepResult, run: str, metric: str, title: str) -> Chart:
    seeds = {seed: m.curves[metric] for seed, m in sorted(result.sweep.runs[run].items()) if metric in m.curves}
    stored = result.sweep.baseline.of(run).curves.get(metric) if result.sweep.baseline else None
    series = [_before(stored)] if stored and stored.steps else []
    series += [_band(seeds)] if len(seeds) > 1 else []
    series += [Series(f"seed {seed}", curve.steps, curve.values, NOW, _kind(curve)) for seed, curve in seeds.items()]
    unit = "s" if metric.startswith("time/") else ""
    return Chart(title, series, unit, levels=_levels(result, run, metric), note="" if series else "no run has this metric")


def _kind(curve: Curve) -> Literal["line", "points"]:
    """Return how to draw a curve: `points` if it has values at few steps, else `line`."""
    gaps = [after - before for before, after in zip(curve.steps, curve.steps[1:], strict=False)]
    return "points" if not gaps or statistics.median(gaps) > 1 else "line"


def _band(seeds: dict[int, Curve]) -> Series:
    values = by_step(seeds.values())
    return Series("all seeds", [*values], (), NOW, "band", [*map(min, values.values())], [*map(max, values.values())])


def _before(stored: StoredCurve) -> Series:
    low = [mean - spread for mean, spread in zip(stored.mean, stored.spread, strict=True)]
    high = [mean + spread for mean, spread in zip(stored.mean, stored.spread, strict=True)]
    return Series("mean", stored.steps, stored.mean, BEFORE, "band", low, high)


def _levels(result: SweepResult, run: str, metric: str) -> list[tuple[float, str]]:
    """Return (value, label) of each limit to draw in a metric's chart: those of gates on a single statistic of the metric."""
    limits = {verdict.gate: verdict.limits for verdict in result.verdicts if verdict.run == run}
    levels = []
    for case in result.sweep.cases(run):
        if case.metrics == [metric] and Expression(case.expression).is_statistic and not case.relative_to:
            ends = (("min", limits[case.name].low), ("max", limits[case.name].high))
            levels += [(end, f"{case.name}: {name}") for name, end in ends if end is not None]
    return levels


def _runs(result: SweepResult) -> Section:
    rows = []
    for ran in result.ran:
        name, state, *numbers = _ran(ran)
        look = "bad" if state != "done" else "warn" if ran.tries > 1 else "good"
        shown: Html = tag("span", "retried" if look == "warn" else state, class_=look)
        measured = result.sweep.runs.get(ran.job.run or "", {}).get(-1 if ran.job.seed is None else ran.job.seed)
        rows.append([name, shown, *numbers, (measured and measured.hardware) or ""])
    failures = [
        details(f"{ran.job.name}, try {number}: {main_line(lines)}", tag("pre", "\n".join(lines)))
        for ran in result.ran
        for number, lines in enumerate(ran.why, 1)
    ]
    return Section("Runs", [table(["run", "", "tries", "restarts", "seconds", "hardware"], rows), *failures])
