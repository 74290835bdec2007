"""Read the stages of a run's start-up, with their durations, and the current stage.

The sources are the manifest, and the files `started` and startup.json of the latest attempt (pipeline/job/startup.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.runs import run_files
from launch.runs.attempts import AttemptFolder, latest
from launch.terminal.units import seconds

NAMES = {
    "join the world": "joining the world",
    "check the nodes": "checking the nodes",
    "set up": "setting up",
    "read the checkpoint": "reading the checkpoint",
}
"""Name of a stage in startup.json -> its name for people. Other stages are shown by their names in startup.json."""
MIN_S = 0.05
"""Completed stages that took fewer seconds are left out of texts."""


@dataclass(frozen=True)
class Stage:
    """One stage of a run's start-up."""

    name: str
    began: float  # unix seconds
    ended: float | None  # unix seconds; None: the stage is current, or the run ended in it
    parts: dict[str, list[Stage]] = field(default_factory=dict)  # stages of most ranks of each component, by component
    about: str = ""


def stages(run_dir: Path) -> list[Stage]:
    """Return the stages of the last submission's latest attempt, oldest first; [] if nothing was submitted."""
    if not (entries := run_files.submissions(run_dir)):
        return []
    entry, waited, attempt = entries[-1], [], latest(run_dir)
    submitted = datetime.fromisoformat(entry["time"]).timestamp()
    if attempt is not None and entry["job_id"] not in re.split("[-.]", attempt.name):
        attempt = None  # an earlier job's
    if entry["executor"] == "slurm" and (attempt is None or attempt.name.endswith("-0")):
        waited = [Stage("waiting in the queue", submitted, attempt.started if attempt else None)]
    if attempt is None:
        return waited or [Stage("starting the processes", submitted, None)]
    return [*waited, *of_attempt(attempt)]


def of_attempt(attempt: AttemptFolder) -> list[Stage]:
    """Return the stages of one attempt."""
    startup = attempt.startup
    if startup is None:
        return [Stage("starting the processes", attempt.started, None)]
    joined = f"{startup['here']} of {startup['world']} ranks"
    realms = {name: [Stage(*row) for row in rows] for name, rows in startup["realms"].items()}
    stages = [Stage("starting the processes", attempt.started, startup["began"])]
    for name, began, end in startup["stages"]:
        parts = realms if name == "set up" else {}
        about = joined if name == "join the world" and end is None else ""
        stages.append(Stage(NAMES.get(name, name), began, end, parts, about))
    return stages


def now(stages: list[Stage]) -> str:
    """Return a text about the current stage; "" if there is none. It has no duration, so that a follower prints it once."""
    latest = stages[-1] if stages else None
    if latest is None or latest.ended is not None:
        return ""
    doing = {realm: rows[-1].name for realm, rows in latest.parts.items() if rows and rows[-1].name != "wait"}
    return (
        latest.name + _in_parentheses(f"{realm}: {stage}" for realm, stage in doing.items()) + _in_parentheses([latest.about])
    )


def text(stages: list[Stage], until: float | None = None) -> str:
    """Return a text about all stages, with their durations.

    until: the unix seconds at which the attempt ended; None while it goes on.
    """
    end = time.time() if until is None else until
    return ", ".join(_stage_text(stage, end, until is None) for stage in stages if _is_shown(stage, end))


def as_plain(stages: list[Stage]) -> list[dict[str, Any]]:
    """Return the stages as plain values, for JSON."""
    return [
        {"name": stage.name, "began": stage.began, "ended": stage.ended}
        | ({"realms": {realm: as_plain(rows) for realm, rows in stage.parts.items()}} if stage.parts else {})
        for stage in stages
    ]


def _stage_text(stage: Stage, end: float, alive: bool) -> str:
    took = seconds(max(0.0, (stage.ended or end) - stage.began))
    suffix = "" if stage.ended else (" so far" if alive else ", not completed")
    parts = [
        f"{realm}: " + ", ".join(_stage_text(row, end, alive) for row in rows if row.name != "wait" and _is_shown(row, end))
        for realm, rows in stage.parts.items()
    ]
    return (
        f"{stage.name} {took}{suffix}"
        + _in_parentheses([stage.about])
        + _in_parentheses(part for part in parts if part[-2:] != ": ")
    )


def _is_shown(stage: Stage, end: float) -> bool:
    return stage.ended is None or stage.ended - stage.began >= MIN_S


def _in_parentheses(parts: Iterable[str]) -> str:
    text = "; ".join(filter(None, parts))
    return f" ({text})" if text else ""
