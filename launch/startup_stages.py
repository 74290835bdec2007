"""The stages of a run's start, with the seconds of each, and the one that is under way.

They come from the manifest and from the latest attempt: `started`, and startup.json (see pipeline/startup.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.attempts import AttemptFolder, latest
from launch.units import seconds

NAMES = {
    "join the world": "joining the world",
    "check the nodes": "checking the nodes",
    "set up": "setting up",
    "read the checkpoint": "reading the checkpoint",
}
"""Names of stages while they last; others keep their own."""
LEAST_S = 0.05
"""Stages that took less are left out, once they are over."""


@dataclass(frozen=True)
class Stage:
    name: str
    began: float  # unix seconds
    ended: float | None  # None: it is under way, or the run ended in it
    parts: dict[str, list[Stage]] = field(default_factory=dict)  # realm -> what most of its ranks do, one after another
    about: str = ""


def stages(run_dir: Path) -> list[Stage]:
    """Return the stages of the last submission's latest attempt, oldest first; none if nothing was submitted."""
    manifest = run_dir / "manifest.json"
    if not manifest.exists() or not (entries := json.loads(manifest.read_text())):
        return []
    entry, waited, attempt = entries[-1], [], latest(run_dir)
    submitted = datetime.fromisoformat(entry["time"]).timestamp()
    if attempt is not None and entry["job_id"] not in re.split("[-.]", attempt.name):
        attempt = None  # of an earlier job
    if entry["executor"] == "slurm" and (attempt is None or attempt.name.endswith("-0")):
        waited = [Stage("waiting in the queue", submitted, attempt.started if attempt else None)]
    if attempt is None:
        return waited or [Stage("starting the processes", submitted, None)]
    return [*waited, *of_attempt(attempt)]


def of_attempt(attempt: AttemptFolder) -> list[Stage]:
    """Return the stages of one start of the ranks."""
    told = attempt.startup
    if told is None:
        return [Stage("starting the processes", attempt.started, None)]
    here = f"{told['here']} of {told['world']} ranks"
    realms = {name: [Stage(*row) for row in rows] for name, rows in told["realms"].items()}
    found = [Stage("starting the processes", attempt.started, told["began"])]
    for name, began, ended in told["stages"]:
        parts = realms if name == "set up" else {}
        about = here if name == "join the world" and ended is None else ""
        found.append(Stage(NAMES.get(name, name), began, ended, parts, about))
    return found


def now(found: list[Stage]) -> str:
    """Return the stage that is under way, without its seconds, so that it is printed once; "" if none is."""
    latest = found[-1] if found else None
    if latest is None or latest.ended is not None:
        return ""
    doing = {realm: rows[-1].name for realm, rows in latest.parts.items() if rows and rows[-1].name != "wait"}
    return latest.name + _within(f"{realm}: {what}" for realm, what in doing.items()) + _within([latest.about])


def text(found: list[Stage], until: float | None = None) -> str:
    """Return all stages with their seconds. until: when the attempt gave its last sign, if it has ended; None: it goes on."""
    end = time.time() if until is None else until
    return ", ".join(_told(stage, end, until is None) for stage in found if _matters(stage, end))


def as_plain(found: list[Stage]) -> list[dict[str, Any]]:
    """Return the stages as plain values, for JSON."""
    return [
        {"name": stage.name, "began": stage.began, "ended": stage.ended}
        | ({"realms": {realm: as_plain(rows) for realm, rows in stage.parts.items()}} if stage.parts else {})
        for stage in found
    ]


def _told(stage: Stage, end: float, alive: bool) -> str:
    took = seconds(max(0.0, (stage.ended or end) - stage.began))
    under_way = "" if stage.ended else (" so far" if alive else ", and no further")
    parts = [
        f"{realm}: " + ", ".join(_told(row, end, alive) for row in rows if row.name != "wait" and _matters(row, end))
        for realm, rows in stage.parts.items()
    ]
    return f"{stage.name} {took}{under_way}" + _within([stage.about]) + _within(part for part in parts if part[-2:] != ": ")


def _matters(stage: Stage, end: float) -> bool:
    return stage.ended is None or stage.ended - stage.began >= LEAST_S


def _within(parts: Iterable[str]) -> str:
    told = "; ".join(filter(None, parts))
    return f" ({told})" if told else ""
