"""Define the errors of runs. Faulty input raises RecipeError instead."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.problems import HetstepError, Problem


class RunFailed(HetstepError):
    """Raised for a run, an evaluation or a sweep that ended by itself before it was complete."""

    def __init__(self, folder: Path, lines: list[str]):
        """Create the error of a run in a folder. lines: why the run ended."""
        super().__init__(Problem("run", "run-failed", "\n".join(lines), str(folder)))
        self.folder = folder


class NotEnded(HetstepError, TimeoutError):
    """Raised if a run has not ended within the time that the caller gave. The run goes on."""

    def __init__(self, folder: Path, activity: str):
        """Create the error of a run in a folder. activity: what the run still does."""
        super().__init__(Problem("timeout", "not-ended", activity, str(folder)))
        self.folder = folder
