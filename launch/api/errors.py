"""The errors of runs, beside RecipeError, which stands for faulty input."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.problems import HetstepError, Problem


class RunFailed(HetstepError):
    """Raised for a run, an evaluation or a sweep that ended by itself before its end."""

    def __init__(self, folder: Path, lines: list[str]):
        """Take the run's folder, and why it ended, in lines."""
        super().__init__(Problem("run", "run-failed", "\n".join(lines), str(folder)))
        self.folder = folder


class NotEnded(HetstepError, TimeoutError):
    """Raised for a run that has not ended within the time that its caller gave. The run goes on."""

    def __init__(self, folder: Path, activity: str):
        """Take the run's folder, and what the run does."""
        super().__init__(Problem("timeout", "not-ended", activity, str(folder)))
        self.folder = folder
