"""What a step of a run consists of, and what each piece takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CLOCKS = ("rollout", "train", "refit")
"""As the loop's own clocks are called: metrics.jsonl has time/<clock>. They follow each other in a step, unless sampling runs
ahead of training: then rollout and training go on at once."""


@dataclass(frozen=True, slots=True)
class Phase:
    clock: str  # one of CLOCKS
    name: str
    flops: float  # of all ranks together
    parts: dict[str, float] = field(default_factory=dict)  # seconds by what takes them; they follow each other

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=self.parts.__getitem__) if self.parts else ""


def seconds_by_clock(phases: list[Phase]) -> dict[str, float]:
    return {clock: total for clock in CLOCKS if (total := sum(p.seconds for p in phases if p.clock == clock))}


def step_seconds(seconds: Mapping[str, float], ahead: bool) -> float:
    """Of a whole step. ahead: whether sampling runs ahead of training, so that only the longer of the two counts."""
    hidden = min(seconds.get("rollout", 0.0), seconds.get("train", 0.0)) if ahead else 0.0
    return sum(seconds.values()) - hidden
