"""Write and read the warnings of an attempt, the lines of resources/warnings.jsonl. `status` shows them.

{"time", "step", "check", "rank", "node", "message"}     a warning; only the last one of each check and rank counts
{"time", "step", "check", "cleared": true}               ends all warnings of the check
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.recipe.secrets import redact

FILE = Path("resources/warnings.jsonl")
"""Path of the warnings in an attempt's folder."""
MEMORY_CHECKS = ("full_memory", "host_leak")
"""Checks of `pipeline/monitor/resource_warnings.py` that warn of host memory."""
LOST_EPISODES = "lost_episodes"
"""Beginning of the names of checks whose warnings the terminal shows too."""
AGAIN_STEPS = 20
"""Number of steps after which a warning that still holds is repeated."""


def warning(step: int, check: str, rank: int, node: str, message: str) -> dict[str, Any]:
    """Return the line of a warning. rank, node: where the check found the problem."""
    return {"time": time.time(), "step": step, "check": check, "rank": rank, "node": node, "message": message}


def cleared_line(step: int, check: str) -> dict[str, Any]:
    """Return the line that ends the warnings of a check."""
    return {"time": time.time(), "step": step, "check": check, "cleared": True}


def append(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines to the end of the file. Raises OSError."""
    if lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as out:
            out.write(redact("".join(json.dumps(line) + "\n" for line in lines)))


def last_warning(attempt: Path, checks: Sequence[str], node: str) -> dict[str, Any] | None:
    """Return the last warning of one of `checks` on a node, from an attempt's folder; None if no warning can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        lines = [json.loads(line) for line in (attempt / FILE).read_text(errors="replace").splitlines()]
        warnings = [line for line in lines if line["check"] in checks and line.get("node") == node and "message" in line]
        return warnings[-1] if warnings else None
    return None
