"""Format the summaries of runs for a terminal or as JSON: a row for each run, or all lines about a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from launch.runs import run_files
from launch.terminal.safe_text import plain
from launch.terminal.units import plural, seconds, size
from pipeline.config.formatting import on_one_line as shown

Row = tuple[str, str]
"""A label and a text."""
BARS = "▁▂▃▄▅▆▇█"
LABEL = 12
"""Width of the labels, in characters."""
HEADER = ("state", "step", "each", "left", "restarts", "written", "last value", "folder")


def text(summary: dict[str, Any]) -> str:
    """Return a text of many lines with all facts about a run. summary: the result of `run_summary.full`."""
    return "\n".join(map(plain, [heading(summary), *(f"{label:{LABEL - 1}s} {text}" for label, text in rows(summary))]))


def as_json(value: Any) -> str:
    """Return JSON, with null in place of NaN, which JSON does not have."""
    return json.dumps(plain_values(value), allow_nan=False)


def plain_values(value: Any) -> Any:
    """Return nested dicts and lists with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- a line per run -----------------------------------------------------------------------------------------------------


def table(summaries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the header and a line for each run, in aligned columns. summaries: results of `run_summary.line`."""
    rows = [HEADER, *map(row, summaries)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    for cells in rows:
        yield "  ".join(f"{cell:{width}s}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def row(run: dict[str, Any]) -> tuple[str, ...]:
    """Return a run's cells of the columns in HEADER. run: the result of `run_summary.line`."""
    folder = _shorter(run["folder"])
    if "step" not in run:
        return (run["state"], "", "", "", "", "", "", f"{folder}: {run['why']}")
    key = next(iter(run["metrics"]), None)
    return (
        run["state"],
        str(run["step"]) if run["max_steps"] is None else f"{run['step']}/{run['max_steps']}",
        seconds(run["seconds_per_step"]) if run["seconds_per_step"] else "",
        duration(run["seconds_left"]),
        str(run["restarts"] or ""),
        f"{since(run['last_written'])} ago",
        f"{key} {run['metrics'][key][-1]:.4g}" if key else "",
        folder,
    )


def _shorter(folder: str) -> str:
    working_folder = f"{Path.cwd()}/"
    return folder.removeprefix(working_folder)


# ---- one run ------------------------------------------------------------------------------------------------------------


def heading(run: dict[str, Any]) -> str:
    """Return the first line about a run: its name, algorithm and folder."""
    return f"{run['name']} ({run['algorithm']}) in {run['folder']}"


def rows(run: dict[str, Any]) -> Iterator[Row]:
    """Yield rows (label, text) with all facts about a run. run: the result of `run_summary.full`."""
    yield _row_of("state", run["state"], run["why"], "the ranks are starting" if run["starting"] and not run["answers"] else "")
    if run["job"]:
        yield _row_of("job", run["job"])
    if run["startup_text"]:
        yield _row_of("start-up", run["startup_text"])
    for part in run["components"]:
        yield f"  {part['name']}", "  ".join(filter(None, [part["state"], part["nodes"], part["reason"]]))
    yield _row_of("runs", f"{run['model']} on {run['backend']}", run["layout"])
    of = "" if run["max_steps"] is None else f" of {run['max_steps']}"
    yield _row_of("step", f"{run['step']}{of}", f"last written {since(run['last_written'])} ago")
    yield from _time(run)
    width = max((len(key) for key in run["metrics"]), default=0)
    for key, values in run["metrics"].items():
        yield f"{key:{width}s}", f"{values[-1]:<10.4g} {sparkline(values)}  {_trend(values)}".rstrip()
    if run["phases"]:
        total = sum(run["phases"].values())
        parts = [
            f"{phase} {seconds(phase_seconds)} ({phase_seconds / total:.0%})" for phase, phase_seconds in run["phases"].items()
        ]
        rate = f"{run['tokens_per_s']:,.0f} tokens/s" if run["tokens_per_s"] else ""
        yield _row_of("phases", ", ".join(parts), rate)
    if run["idle"]:
        yield _row_of("idle", ", ".join(f"{realm} {share:.0%}" for realm, share in run["idle"].items()))
    for i, (component, text) in enumerate(run["resources"].items()):
        yield _row_of("resources" if i == 0 else "", f"{component}: {text}")
    for i, warning in enumerate(run["warnings"]):
        yield _row_of("warnings" if i == 0 else "", f"step {warning['step']}: {warning['message']}")
    if run["answers"]:
        yield _row_of("answers", run["answers"].removeprefix("answers: "))
    if run["trains"]:
        yield _row_of("checkpoint", *_checkpoint(run["checkpoint"]))
    yield from _changes(run)
    for suite in run["evaluations"]:
        yield _row_of("evaluation", *_evaluation(suite, run))
    if len(run["attempts"]) > 1 or any(attempt["bad_nodes"] for attempt in run["attempts"]):
        yield from _starts(run["attempts"], run["state"] in ("running", "waiting", "unknown"))
    for i, line in enumerate(run["failure"]):
        yield _row_of("failure" if i == 0 else "", line)
    yield _row_of("logs", run["logs"])


def _row_of(label: str, *texts: str) -> Row:
    return label, "; ".join(filter(None, texts))


def _time(run: dict[str, Any]) -> Iterator[Row]:
    ends, saves = run["ends_by"], run["saves_by"]
    pace = f"{seconds(run['seconds_per_step'])} from step to step" if run["seconds_per_step"] else ""
    left_text = f"{duration(run['seconds_left'])} left" if run["seconds_left"] is not None else ""
    limit = f"time limit in {until(ends)}, at {clock(ends)}" if ends else ""
    by = f"must save by {clock(saves)}" if saves else ""
    if texts := [text for text in (pace, left_text, limit, by) if text]:
        yield _row_of("time", *texts)


def _changes(run: dict[str, Any]) -> Iterator[Row]:
    """Yield rows about changed keys of the run, and about requested changes that the run has not made yet."""
    finished = [
        (
            f"after step {change['step']}: {change['key']} {shown(change['old'])} -> {shown(change['new'])}",
            f"by {change['user']}",
        )
        for change in run["changes"]
    ]
    requested = [
        (f"asked: {key} -> {shown(value)}",) for change in run["asked_changes"] for key, value in change["values"].items()
    ]
    for i, texts in enumerate([*finished, *requested]):
        yield _row_of("changes" if i == 0 else "", *texts)


def _checkpoint(run: dict[str, Any]) -> Iterator[str]:
    if "step" in run:
        yield f"step {run['step']}, {since(run['written'])} ago, {size(run['bytes'])}, complete"
        if run["count"] > 1:
            yield f"{plural(run['count'] - 1, 'earlier one')} kept"
    else:
        yield "none complete yet"
    if run["partial"]:
        yield f"being written, or interrupted: {', '.join(run['partial'])}"
    if run["incomplete"]:
        yield f"not complete: {', '.join(run['incomplete'])}"


def _evaluation(suite: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    scores = suite["scores"]
    latest = ""
    if scores:
        parts = (f"{task} {_score(score['value'])} ({_ends(score)})" for task, score in scores[max(scores)].items())
        latest = f": step {max(scores)}: {', '.join(parts)}"
    yield f"{suite['suite']}{latest}"
    for label, steps in (("evaluated", list(scores)), ("begun", suite["begun"]), ("pending", suite["pending"])):
        if steps:
            yield f"{label}: {', '.join(map(str, sorted(steps)))}"
    for step, reason in suite["failed"].items():
        yield f"step {step} failed: {reason}"
    if suite["asked"] and not suite["followed"] and (suite["pending"] or run["state"] in ("running", "waiting")):
        yield f"no process evaluates new checkpoints. Start it: python launch/evaluate.py run={run['folder']} step=follow"


def _ends(score: dict[str, Any]) -> str:
    return " to ".join(_score(score[end]) for end in ("low", "high"))


def _score(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _starts(attempts: list[dict[str, Any]], goes_on: bool) -> Iterator[Row]:
    for i, attempt in enumerate(attempts):
        latest = i == len(attempts) - 1
        verdict = attempt["verdict"] or ("under way" if latest and goes_on else "ended without a verdict")
        yield _row_of(
            "starts" if i == 0 else "", f"{i + 1}: {clock(attempt['started'])}, {duration(attempt['lasted'])}", verdict
        )
        for node, reason in attempt["bad_nodes"].items():
            yield _row_of("", f"   bad node {node}: {reason}")
        if attempt["failure"] and not latest:  # the latest failure is shown in full
            yield _row_of("", f"   rank {attempt['failure']['rank']}: {run_files.last_line(attempt['failure'])}")


# ---- numbers for people -------------------------------------------------------------------------------------------------


def sparkline(values: list[float]) -> str:
    """Return a text with a bar for each value, scaled from the minimum to the maximum; a space for NaN."""
    numbers = [value for value in values if value == value]
    if len(numbers) < 2:
        return ""
    low, high = min(numbers), max(numbers)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if value == value else " " for value in values)


def _trend(values: list[float]) -> str:
    """Return a text with the mean of the later half of the values, and its difference from the mean of the earlier half."""
    numbers = [value for value in values if value == value]
    half = len(numbers) // 2
    if half < 2:
        return ""
    before, now = sum(numbers[:half]) / half, sum(numbers[-half:]) / half
    return f"mean {now:.4g}, {now - before:+.3g} over {half} steps"


def duration(value: float | None) -> str:
    """Return seconds as `D days, H:MM:SS`; "" for None."""
    return "" if value is None else str(timedelta(seconds=round(value)))


def since(moment: float) -> str:
    """Return the time since a moment in unix seconds."""
    return duration(max(0.0, time.time() - moment))


def until(moment: float) -> str:
    """Return the time until a moment in unix seconds; 0 if it has passed."""
    return duration(max(0.0, moment - time.time()))


def clock(moment: float) -> str:
    """Return a moment in unix seconds as local date and time."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
