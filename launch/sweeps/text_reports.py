"""Write a sweep's report as Markdown, and as JUnit XML for CI tools."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from launch.sweeps.gates import GateResult, Verdict
from launch.sweeps.verdict import JobResult, SweepResult, baseline_of, main_line

SIGNS = {GateResult.PASSED: "✅", GateResult.FAILED: "❌", GateResult.NOT_JUDGED: "⚠️ not judged"}


def markdown(result: SweepResult) -> str:
    """Return the report as Markdown: failed gates, all gates, the runs."""
    parts = [f"# {result.title}: {'passed' if result.passed else 'failed'}", "", f"{result.summary}."]
    if result.failed:
        parts += [
            "",
            "## Failed",
            "",
            *(f"- **{verdict.run}, {verdict.gate}**: {_plain(verdict.message)}" for verdict in result.failed),
        ]
    if result.notes:
        parts += ["", "## Notes", "", *(f"- {_plain(note)}" for note in result.notes)]
    parts += ["", "## Gates", "", *_table(("run", "gate", "", "found and expected"), map(_row, result.verdicts))]
    parts += ["", "## Runs", "", *_table(("run", "", "tries", "restarts", "seconds", "failures"), map(_ran, result.ran))]
    parts += ["", f"Evaluated {result.judged}, commit {' and '.join(result.commits) or 'unknown'}; {baseline_of(result)}."]
    return "\n".join([*parts, ""])


def _row(verdict: Verdict) -> tuple[str, ...]:
    return verdict.run, verdict.gate, SIGNS[verdict.outcome], verdict.message


def _ran(ran: JobResult) -> tuple[str, ...]:
    failures = "; ".join(map(main_line, ran.why))
    return ran.job.name, ran.state, str(ran.tries), str(ran.restarts), f"{ran.seconds:.0f}", failures


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
    names = list(dict.fromkeys(verdict.run for verdict in result.verdicts))
    suites = ElementTree.Element("testsuites", _counts(f"{name} {result.folder.name}", result.verdicts, result.ran))
    for run in names:
        verdicts = [verdict for verdict in result.verdicts if verdict.run == run]
        ran = [outcome for outcome in result.ran if (outcome.job.run or outcome.job.name) == run]
        attributes = {**_counts(f"{name}.{run}", verdicts, ran), "timestamp": result.judged}
        suite = ElementTree.SubElement(suites, "testsuite", attributes)
        _properties(suite, result, ran)
        for verdict in verdicts:
            _case(suite, name, verdict, ran)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _counts(name: str, verdicts: list[Verdict], ran: list[JobResult]) -> dict[str, str]:
    failed = sum(verdict.outcome is GateResult.FAILED for verdict in verdicts)
    skipped = sum(verdict.outcome is GateResult.NOT_JUDGED for verdict in verdicts)
    counts = {"tests": len(verdicts), "failures": failed, "errors": 0, "skipped": skipped}
    seconds = sum(outcome.seconds for outcome in ran)
    return {"name": name, **{key: str(value) for key, value in counts.items()}, "time": f"{seconds:.3f}"}


def _properties(suite: ElementTree.Element, result: SweepResult, ran: list[JobResult]) -> None:
    pairs = [("commit", commit) for commit in result.commits]
    pairs += [("retried", outcome.job.name) for outcome in ran if outcome.tries > 1]
    pairs += [("restarts", f"{outcome.job.name}: {outcome.restarts}") for outcome in ran if outcome.restarts]
    if pairs:
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in pairs:
            ElementTree.SubElement(properties, "property", {"name": key, "value": value})


def _case(suite: ElementTree.Element, name: str, verdict: Verdict, ran: list[JobResult]) -> None:
    job = next((outcome for outcome in ran if outcome.gate == verdict.gate), None)
    seconds = f"{job.seconds if job else 0.0:.3f}"
    attributes = {"classname": f"{name}.{verdict.run}", "name": verdict.gate, "time": seconds}
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
