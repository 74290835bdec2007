"""The warnings of an attempt: resources/warnings.jsonl, a line for each, which `status` shows.

{"time", "step", "check", "rank", "node", "message"}     a warning; of a check and a rank the last one counts
{"time", "step", "check", "cleared": true}               the check's warnings hold no longer
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.recipe.secrets import redacted

FILE = Path("resources/warnings.jsonl")
"""In an attempt's folder."""
MEMORY_CHECKS = ("full_memory", "host_leak")
"""Checks of `pipeline/monitor/resource_warnings.py` that warn of host memory."""
AGAIN_STEPS = 20
"""Steps until a warning that still holds is given again."""


def warning(step: int, check: str, rank: int, node: str, message: str) -> dict[str, Any]:
    """Return the line of a warning. rank, node: where it was found."""
    return {"time": time.time(), "step": step, "check": check, "rank": rank, "node": node, "message": message}


def cleared_line(step: int, check: str) -> dict[str, Any]:
    """Return the line that ends the warnings of a check."""
    return {"time": time.time(), "step": step, "check": check, "cleared": True}


def append(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines to the end of the file. Raises OSError."""
    if lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as out:
            out.write(redacted("".join(json.dumps(line) + "\n" for line in lines)))


def last_warning(attempt: Path, checks: Sequence[str], node: str) -> dict[str, Any] | None:
    """Return the last warning of some checks on a node, from an attempt's folder; None without any that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        lines = [json.loads(line) for line in (attempt / FILE).read_text(errors="replace").splitlines()]
        warnings = [line for line in lines if line["check"] in checks and line.get("node") == node and "message" in line]
        return warnings[-1] if warnings else None
    return None
