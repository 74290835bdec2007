"""The report as Markdown: what failed first, then every gate, then the runs."""

from __future__ import annotations

from launch.sweeps.gates import Outcome, Verdict
from launch.sweeps.verdict import Ran, Result, telling

SIGNS = {Outcome.PASSED: "✅", Outcome.FAILED: "❌", Outcome.NOT_JUDGED: "⚠️ not judged"}


def markdown(result: Result) -> str:
    parts = [f"# {result.title}: {'passed' if result.passed else 'failed'}", "", f"{result.summary}."]
    if result.failed:
        parts += ["", "## Failed", "", *(f"- **{each.run}, {each.gate}**: {_plain(each.said)}" for each in result.failed)]
    if result.notes:
        parts += ["", "## Notes", "", *(f"- {_plain(note)}" for note in result.notes)]
    parts += ["", "## Gates", "", *_table(("run", "gate", "", "found and wanted"), map(_row, result.verdicts))]
    parts += ["", "## Runs", "", *_table(("run", "", "tries", "restarts", "seconds", "failures"), map(_ran, result.ran))]
    parts += ["", f"Judged {result.judged}, of commit {' and '.join(result.commits) or 'unknown'}; {baseline_of(result)}."]
    return "\n".join([*parts, ""])


def _row(verdict: Verdict) -> tuple[str, ...]:
    return verdict.run, verdict.gate, SIGNS[verdict.outcome], verdict.said


def _ran(ran: Ran) -> tuple[str, ...]:
    failures = "; ".join(map(telling, ran.why))
    return ran.job.name, ran.state, str(ran.tries), str(ran.restarts), f"{ran.seconds:.0f}", failures


def baseline_of(result: Result) -> str:
    if result.sweep.baseline is None:
        return "there is no baseline"
    origin = result.sweep.baseline.provenance
    return f"the baseline is of {origin.date}, from {origin.sweep}, commit {origin.commit or 'unknown'}"


def _table(header: tuple[str, ...], rows) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return [f"| {' | '.join(_plain(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def _plain(text: str) -> str:
    """On one line, and no markup of its own."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")
