"""Define a step's phases and their durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CLOCKS = ("rollout", "train", "refit")
"""Names of the clocks, as in time/<clock> of metrics.jsonl. `step_time.py` combines them into the duration of a step."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step: its floating-point operations and its duration by part."""

    clock: str  # one of CLOCKS
    name: str
    flops: float  # of all ranks together
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each part; parts do not overlap

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts."""
        return sum(self.parts.values())


def seconds_by_clock(phases: Sequence[Phase]) -> dict[str, float]:
    """Return clock -> seconds of its phases, in the order of CLOCKS, without clocks that have no phase."""
    return {clock: total for clock in CLOCKS if (total := sum(p.seconds for p in phases if p.clock == clock))}
