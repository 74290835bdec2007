"""Build the overview of a report: state, recipe, progress and duration of each run, and its attempts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from launch.drawing.html import Html, table, tag, text
from launch.pages.chart import swatch
from launch.pages.curves import LabelledRun
from launch.runs import run_changes, run_files
from launch.runs.attempts import AttemptFolder
from launch.runs.run_folder import MetricColumns, last_active
from launch.runs.run_state import RunState
from launch.runs.status_text import duration
from launch.terminal.units import plural
from pipeline.config.formatting import on_one_line

OUTCOMES = ("val/accuracy", "val/reward", "val/loss", "train/reward", "train/loss")
"""Metrics whose first and last value are shown."""
WIDE = ("layout", "versions", "command", "folder")
CLASSES = {"done": "good", "running": "good", "failed": "bad", "stopped": "warn", "unknown": "warn"}


def overview(labelled: Sequence[LabelledRun], states: Sequence[RunState]) -> list[Html]:
    """Return elements with the facts of each run, its changes of keys, and its attempts if it was restarted or failed."""
    columns = [_facts(labelled_run, state) for labelled_run, state in zip(labelled, states, strict=True)]
    content = [_tiles(columns[0]) if len(labelled) == 1 else _side_by_side(labelled, columns)]
    for labelled_run in labelled:
        if len(labelled_run.run.attempts) > 1 or any(attempt.failure for attempt in labelled_run.run.attempts):
            of = f" of {labelled_run.label}" if len(labelled) > 1 else ""
            starts = [_attempt(i, attempt) for i, attempt in enumerate(labelled_run.run.attempts)]
            names = ["", "attempt", "started", "lasted", "verdict", "first failure"]
            content.append(table(names, starts, f"Starts{of}"))
        if changes := run_changes.rows(labelled_run.run):
            of = f" of {labelled_run.label}" if len(labelled) > 1 else ""
            names = ["after step", "key", "from", "to", "by", "at"]
            content.append(table(names, [_change_cells(change) for change in changes], f"Changes while it ran{of}"))
    return content


def _change_cells(change: dict[str, Any]) -> list[object]:
    values = (tag("code", on_one_line(change[name])) for name in ("old", "new"))
    return [change["step"], tag("code", change["key"]), *values, change["user"], moment(change["time"])]


def _tiles(facts: dict[str, object]) -> Html:
    def tile(name: str) -> Html:
        return tag("div", tag("dt", name), tag("dd", facts[name]), class_="wide" if name in WIDE else None)

    return tag("dl", *map(tile, sorted(filter(facts.get, facts), key=lambda name: name in WIDE)))


def _side_by_side(labelled: Sequence[LabelledRun], columns: list[dict[str, object]]) -> Html:
    header = ["", *(text(swatch(i), labelled_run.label) for i, labelled_run in enumerate(labelled))]
    names = [name for name in columns[0] if any(column[name] for column in columns)]
    return table(header, [[name, *(column[name] for column in columns)] for name in names])


def _facts(labelled: LabelledRun, state: RunState) -> dict[str, object]:
    """Return name of a fact -> value. Every run has the same facts; a value is empty if it is not known."""
    run, metrics = labelled.run, labelled.metrics
    of = "" if run.max_steps is None else f" of {run.max_steps}"
    last = run.submissions[-1] if run.submissions else {}
    git, versions = last.get("git"), last.get("versions", {})
    busy = run.busy_s()
    return {
        "state": text(tag("span", state.name, class_=CLASSES.get(state.name)), f" {state.why}" if state.why else None),
        "recipe": f"{run.name}, {run.algorithm}",
        "model": run.model,
        "backend": run.backend,
        "layout": run.layout,
        "steps": f"{metrics.steps[-1]:.0f}{of}" if metrics.steps else f"none yet{of}",
        **{key: _change(metrics, key) for key in OUTCOMES},
        "step": _median_step(metrics),
        "busy": duration(busy) if busy else "",
        "GPU-hours": _gpu_hours(run.gpus, busy),
        "restarts": str(len(run.attempts) - 1) if run.attempts else "",
        "submitted": f"{moment_of(last['time'])} by {last['user']} on {last['host']}" if last else "",
        "job": state.job,
        "commit": tag("code", git["commit"][:12], " with changes" if git["dirty"] else "") if git else "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "command": tag("code", _command(last["command"])) if last else "",
        "folder": tag("code", run.folder),
    }


def _gpu_hours(gpus: int, busy_s: float) -> str:
    if not busy_s:
        return ""
    return f"{gpus * busy_s / 3600:.4g} on {plural(gpus, 'GPU')}" if gpus else "none: no GPUs"


def _change(metrics: MetricColumns, key: str) -> str:
    """Return a text with the first and the last value of a metric; "" if it has fewer than two values."""
    values = metrics.columns[key][1] if key in metrics.columns else ()
    return f"{values[0]:.4g} → {values[-1]:.4g}" if len(values) > 1 else ""


def _median_step(metrics: MetricColumns) -> str:
    seconds = sorted(metrics.columns["time/step"][1]) if "time/step" in metrics.columns else []
    return f"{seconds[len(seconds) // 2]:.3g} s (median)" if seconds else ""


def _command(command: str) -> str:
    """Return the command that submitted a run, without the paths of the interpreter and the checkout."""
    words = shlex.split(command)
    script = next((i for i, word in enumerate(words) if word.endswith("launch/submit.py")), None)
    return command if script is None else shlex.join(["python", "launch/submit.py", *words[script + 1 :]])


def _attempt(index: int, attempt: AttemptFolder) -> list[object]:
    record = attempt.failure
    failure = ""
    if record:
        failure = f"rank {record['rank']} ({run_files.where(record)}): {run_files.last_line(record)}"
    verdict = attempt.verdict or ""
    kind = "good" if verdict == "done" else "bad" if verdict.startswith("stop") else None
    lasted = duration(max(0.0, last_active(attempt) - attempt.started))
    return [index + 1, attempt.name, moment(attempt.started), lasted, tag("span", verdict, class_=kind), failure]


def moment(unix_s: float) -> str:
    """Format unix seconds as a UTC date and time, to the minute."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def moment_of(iso: str) -> str:
    """Format an ISO 8601 time with its offset as UTC, to the minute."""
    return moment(datetime.fromisoformat(iso).timestamp())
