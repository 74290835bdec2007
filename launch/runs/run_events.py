"""Tell extras about the events of commands: a run is submitted, cancelled, changed or exported, or a command is refused.

`pipeline/seams/job_events.py` tells them about the events of a run's job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline.config import Problem, Recipe, RecipeError
from pipeline.files.storage import user_name
from pipeline.seams import extras

OBSERVERS = ("audit", "ancestry")
"""Names of extras whose module has a RunObserver named `OBSERVER`."""
DENIED = "permission-denied"
Result = TypeVar("Result")


class RunObserver:
    """Observes the events of commands. The methods do nothing; an extra overrides those that it needs.

    A method that raises RecipeError ends the command.
    """

    def submitting(self, recipe: Recipe, run_dir: Path, executor: str, origin: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe is about to be submitted. Return keys to add to its entry of manifest.json. origin: read by `origin.py`."""
        return {}

    def prepared(self, recipe: Recipe, run_dir: Path) -> list[str]:
        """The run's folder now has all files that the job will read. Return warnings to print."""
        return []

    def submitted(self, recipe: Recipe, run_dir: Path, job: str, job_id: str) -> None:
        """A recipe's job was submitted. job: the job's name."""

    def ending(self, action: Literal["cancel", "stop_and_save"], run_dir: Path, job: str, job_id: str, state: str) -> None:
        """A job is about to be cancelled, or asked to save and stop. state: the job's state."""

    def changing(self, run_dir: Path, values: Mapping[str, Any]) -> None:
        """Keys of a live run are about to be changed to these values."""

    def exporting(self, run_dir: Path, step: int, form: str, out: Path) -> dict[str, Any]:
        """A checkpoint is about to be exported. Return the `receipts` to pass to `exported`. form: hf or adapter."""
        return {}

    def exported(self, run_dir: Path, checkpoint: Path, step: int, form: str, out: Path, receipts: Mapping[str, Any]) -> None:
        """The export of a checkpoint is in the folder `out`."""

    def refused(self, run_dir: Path, reasons: list[str], audit: str | None) -> None:
        """A command was denied a permission. audit: the value of `cluster.audit`; None: the value in the run's recipe."""

    def variables(self) -> dict[str, str]:
        """Return additional environment variables for a process that does this command's work."""
        return {}


def emit(event: Callable[[RunObserver], Result]) -> list[Result]:
    """Call `event` with each installed observer in order, and return the results. Errors propagate."""
    return [event(observer) for observer in extras.observers(OBSERVERS)]


def environment() -> dict[str, str]:
    """Return all environment variables for a process that does this command's work."""
    environ = dict(os.environ)
    for variables in emit(lambda observer: observer.variables()):
        environ |= variables
    return environ


@contextlib.contextmanager
def refusals(run_dir: Path, audit: str | None = None) -> Iterator[None]:
    """Tell the observers if the code in the block is denied a permission for a file, for a folder or in a cluster.

    A denial always raises RecipeError with the code `permission-denied`. run_dir: the run that the block is about. audit: the
    value of `cluster.audit`; None: the value in the run's recipe.
    """
    try:
        yield
    except PermissionError as error:
        denied = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        message = f"got {denied}; expected a path that {user_name(os.geteuid())} may use. Ask its owner for access"
        refusal = RecipeError(Problem("run", DENIED, message))
        _tell(refusal, run_dir, audit)
        raise refusal from error
    except RecipeError as error:
        _tell(error, run_dir, audit)
        raise


def _tell(error: RecipeError, run_dir: Path, audit: str | None) -> None:
    if denied := [str(problem) for problem in error.problems if problem.code == DENIED]:
        emit(lambda observer: observer.refused(run_dir.absolute(), denied, audit))
