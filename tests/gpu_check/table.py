"""The result of each part, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"


@dataclass
class Result:
    part: str
    outcome: str  # PASSED, FAILED or LEFT_OUT
    note: str = ""
    numbers: dict[str, float | None] = field(default_factory=dict)  # by name with unit; None: unknown on this device
    seconds: float = 0.0
    log: str = ""  # the end of a failed part's output


def text(machine: Mapping[str, object], results: Sequence[Result]) -> str:
    """Return the table for the terminal."""
    gpus = ", ".join(f"{count} {name}" for name, count in Counter(machine["gpus"]).items()) or "CPU"
    versions = ", ".join(f"{name} {version or 'none'}" for name, version in machine["versions"].items())
    rows = [("part", "", "s", "")]
    for result in results:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items() if value is not None)
        rows.append((result.part, result.outcome, f"{result.seconds:.0f}", "; ".join(filter(None, [numbers, result.note]))))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    counts = Counter(result.outcome for result in results)
    end = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, LEFT_OUT))
    return "\n".join(["", f"{gpus}; CUDA {machine['cuda']}; {versions}", "", *lines, "", end])
