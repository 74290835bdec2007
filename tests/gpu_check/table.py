"""The result of each part, and the table of all."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, CUT, LEFT_OUT = "passed", "failed", "cut", "left out"
"""Outcomes of a part. Cut: the check's time was over, or it was ended."""
WIDTH = 128  # of the table
LATE = "late"
"""Until it is known why: then failed or cut."""


@dataclass
class Result:
    part: str
    outcome: str
    note: str = ""
    numbers: dict[str, float | None] = field(default_factory=dict)  # by name with unit; None: unknown on this device
    details: dict[str, Any] = field(default_factory=dict)  # for gpu_check.json alone
    seconds: float = 0.0
    log: str = ""  # the end of the output, unless the part passed


def row(result: Result) -> str:
    """Return what a part found, in one line."""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items() if value is not None)
    return "; ".join(filter(None, [numbers, result.note]))


def text(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Return the table for the terminal."""
    gpus = ", ".join(f"{count} {name}" for name, count in Counter(machine.get("gpus", [])).items()) or "CPU"
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in machine.get("versions", {}).items())
    rows = [("part", "", "s", "")]
    rows += [(result.part, result.outcome, f"{result.seconds:.0f}", row(result)) for result in results]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    start = sum(widths) + 6
    lines = []
    for name, outcome, seconds, rest in rows:
        first, *others = textwrap.wrap(rest, max(40, WIDTH - start)) or [""]
        lines.append(f"{name:{widths[0]}}  {outcome:{widths[1]}}  {seconds:>{widths[2]}}  {first}".rstrip())
        lines += [f"{'':{start}}{line}" for line in others]
    counts = Counter(result.outcome for result in results)
    end = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, CUT, LEFT_OUT) if counts[outcome])
    return "\n".join(["", f"{gpus}; CUDA {machine.get('cuda')}; {versions}", "", *lines, "", end])
