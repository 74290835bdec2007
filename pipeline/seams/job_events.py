"""Tell extras about the events of a run in its job. `launch/runs/run_events.py` tells them about commands on the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.seams import extras

if TYPE_CHECKING:
    from pipeline.config import Recipe

OBSERVERS = ("lineage", "tracking")
"""Names of extras whose module has an `OBSERVER`."""
Result = TypeVar("Result")


class JobObserver:
    """Observes the events of a job. Each method does nothing here; an extra overrides the methods that it needs."""

    def started(self, run_dir: Path) -> None:
        """Rank 0 begins to coordinate."""

    def claimed(self, recipe: Recipe, run_dir: Path, attempt: Path) -> None:
        """The attempt in the folder `attempt` may write into the run's folder, and is about to train."""

    def left(self, goes_on: bool) -> None:
        """The loop has ended. goes_on: whether another attempt goes on with the run."""

    def ended(self, run_dir: Path) -> None:
        """Rank 0 has stopped the other ranks."""

    def checkpoint_written(self, partial: Path, run_dir: Path, step: int, attempt: str) -> None:
        """All files of a checkpoint are on disk in `partial`. Only the files that ranks wrote have their digests yet."""


def emit(event: Callable[[JobObserver], Result]) -> list[Result]:
    """Call `event` with each observer that is here, in order, and return the results. Errors propagate."""
    return [event(observer) for observer in extras.observers(OBSERVERS)]
