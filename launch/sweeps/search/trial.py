"""Define a trial of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.sweeps.search import space

StateOfTrial = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """Holds the parameter values of a trial, and what its run has reported."""

    number: int
    state: StateOfTrial
    values: space.Values
    reports: Mapping[int, float]  # the metric by step; NaN where it was not finite
    value: float | None  # the metric at the end; of a pruned trial the last one reported; None without one
    why: str = ""  # of a failed trial
    pruned_at: int | None = None  # the step at which it was decided to stop the trial

    @property
    def name(self) -> str:
        """Name of the trial's job and of its run folder."""
        return f"trial-{self.number:04d}"
