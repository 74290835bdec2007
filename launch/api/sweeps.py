"""Start a sweep, and read the states of its jobs and its verdict."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from launch.api.errors import NotEnded, RunFailed
from launch.api.overrides import Overrides, arguments, naming_arguments
from launch.api.training import Run
from launch.executors.executor import ROOT, start_detached
from launch.executors.slurm import HetSlurmJob
from launch.executors.slurm_client import SlurmError
from launch.governance import audit_log
from launch.runs.failure_logs import tail
from launch.submission import run_control
from launch.sweeps import search_loop, submission
from launch.sweeps import suite as suites
from launch.sweeps.search_report import Trial
from launch.sweeps.suite import LoadedSuite
from launch.sweeps.sweep_folder import PROBE_S, SweepFolder
from launch.sweeps.verdict import read as read_verdict
from pipeline.config import Problem, RecipeError

LOG = "sweep.log"
POLL_S = 0.5
SLURM_POLL_S = 5.0
SETTLE_S = 5.0
"""Seconds after which a sweep without a verdict counts as stopped if no process or job will write one.

The time allows one process or job to take over from another.
"""
LOG_LINES = 20
CANCEL_S = 60.0
"""Seconds that a sweep's process may take to end after the sweep was cancelled."""

SweepState = Literal["running", "passed", "failed", "cancelled", "stopped"]
"""`failed`: a gate failed, or no trial of a search is complete. `stopped`: the sweep ended without a verdict."""


@dataclass(frozen=True)
class SweepVerdict:
    """The outcome of a sweep."""

    passed: bool
    summary: str  # in a line
    gates: Sequence[Mapping[str, Any]]  # run, gate, outcome and more of each gate, as in verdict.json


class SweepRun:
    """A sweep in its folder, as `hetstep.sweep` returns it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None):
        """Open the sweep in a folder.

        process: the process that submits its jobs, if this program has just started it.
        """
        self.folder = folder.absolute()
        self._process = process

    def __repr__(self) -> str:
        return f"SweepRun({str(self.folder)!r})"

    def states(self) -> dict[str, str]:
        """Return job -> its state: missing (not submitted yet), live, done, failed or, in a search, pruned.

        Where Optuna is not installed, a pruned trial is `failed`. Raises RecipeError if the jobs cannot be queried from here.
        """
        folder = SweepFolder(self.folder)
        if not folder.begun:
            return {}
        states: dict[str, str] = {job.job.name: job.state for job in folder.job_states()}
        searched = folder.suite.search
        if searched is None or any(submission.package_problems(searched)):
            return states
        return states | {job.name: "pruned" for job in self.trials() if job.state == "pruned"}

    def trials(self) -> list[Trial]:
        """Return the trials of a search in order, in their current state; [] for a sweep without a search.

        Raises RecipeError if Optuna is missing.
        """
        folder = SweepFolder(self.folder)
        return search_loop.trials_of(folder) if folder.begun and folder.suite.search is not None else []

    def runs(self) -> dict[str, Run]:
        """Return job -> its run, for the runs that have been submitted."""
        jobs = SweepFolder(self.folder).plan.jobs if SweepFolder(self.folder).begun else []
        return {job.name: Run(Path(job.run_dir)) for job in jobs if (Path(job.run_dir) / "recipe.yaml").exists()}

    def verdict(self) -> SweepVerdict | None:
        """Return the verdict; None until the gates have been checked."""
        if self._submits() or (verdict := read_verdict(self.folder)) is None:  # a process that continues a sweep judges it anew
            return None
        return SweepVerdict(verdict["passed"], verdict["summary"], verdict["verdicts"])

    def log(self) -> list[str]:
        """Return the last lines that the submitting process has written, then the last lines that the check has written."""
        logs = [path for name in (LOG, "check.log") if (path := self.folder / name).exists()]
        return [line for path in logs for line in tail(path).splitlines()[-LOG_LINES:]]

    def state(self) -> SweepState:
        """Return the state of the sweep as a whole. Raises RecipeError if its jobs cannot be queried from here."""
        goes_on = self.verdict() is None and self._goes_on()
        if (verdict := self.verdict()) is not None:  # which its process may have written meanwhile
            return "passed" if verdict.passed else "failed"
        if goes_on:
            return "running"
        return "cancelled" if SweepFolder(self.folder).cancelled else "stopped"

    def cancel(self, timeout: float = CANCEL_S) -> SweepState:
        """Make the sweep submit nothing more, cancel its jobs, and return the state. `hetstep.sweep` continues it.

        Does nothing to a sweep with a verdict. The runs of needed recipes go on if another command submitted them.

        Args:
            timeout: seconds to wait for the process that submits the jobs.

        Raises:
            NotEnded: after `timeout`. The process submits nothing more; call again to cancel the jobs.
            RecipeError: if the jobs cannot be queried or cancelled from here.
        """
        if self.verdict() is not None:
            return self.state()
        folder, deadline = SweepFolder(self.folder), time.monotonic() + timeout
        try:
            while True:
                folder.cancel()  # again, since a process that has just started takes the sweep up
                if not self._submits():
                    break
                if time.monotonic() >= deadline:
                    raise NotEnded(self.folder, "the process that submits the sweep's jobs has not ended")
                time.sleep(POLL_S)
            _cancel_check(folder)
            with folder.locked(max(0.0, deadline - time.monotonic())):
                _cancel_jobs(folder)
        except SlurmError as error:
            raise RecipeError(Problem("folder", "unreachable", f"Slurm did not answer: {error}. Try again")) from error
        except RecipeError as error:
            if error.codes != ("in-use",):
                raise
            raise NotEnded(self.folder, "another process is still working on the sweep") from None
        return self.state()

    def wait(self, timeout: float | None = None) -> SweepVerdict:
        """Wait for the verdict and return it, whether the sweep passed or not.

        Args:
            timeout: seconds; None: without a limit.

        Raises:
            NotEnded: after `timeout`. The sweep goes on.
            RunFailed: if nothing is left that would write the verdict.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        last_alive = time.monotonic()
        while (verdict := self.verdict()) is None:
            now = time.monotonic()
            if self._goes_on():
                last_alive = now
            elif now - last_alive > SETTLE_S:
                raise RunFailed(self.folder, ["the sweep ended without a verdict", *self.log()])
            if deadline is not None and now >= deadline:
                raise NotEnded(self.folder, "the sweep has no verdict yet")
            time.sleep(SLURM_POLL_S if self._is_on_slurm() and not self._submits() else POLL_S)
        return verdict

    def _submits(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _is_on_slurm(self) -> bool:
        folder = SweepFolder(self.folder)
        return folder.begun and folder.plan.executor == "slurm"

    def _goes_on(self) -> bool:
        """Return whether a process holds the sweep's lock, or the job that checks the gates is live."""
        if self._submits() or _is_locked(self.folder):
            return True
        return self._is_on_slurm() and SweepFolder(self.folder).check_job() is not None


def _cancel_check(folder: SweepFolder) -> None:
    """Cancel the Slurm job that would check the sweep's gates. Raises SlurmError."""
    if folder.begun and folder.plan.executor == "slurm" and (job_id := folder.check_job()):
        HetSlurmJob(folder.path, job_id).cancel()


def _cancel_jobs(folder: SweepFolder) -> None:
    """Cancel the live jobs of a sweep. The caller holds its lock. Raises SlurmError or RecipeError."""
    _cancel_check(folder)  # which a process may have submitted meanwhile
    for state in folder.job_states() if folder.begun else []:
        if state.state != "live" or state.record is None:
            continue
        if state.job.run is not None or state.record.job_id in {s.job_id for s in folder.submissions(state.job.name)}:
            run_dir = Path(state.job.run_dir)
            run_control.cancel(run_dir, state.record.attach(run_dir))


def _is_locked(path: Path) -> bool:
    try:
        with SweepFolder(path).locked():
            return False
    except RecipeError as error:
        if error.codes == ("in-use",):
            return True
        raise


def sweep(
    name: str | os.PathLike[str],
    overrides: Overrides | None = None,
    /,
    *,
    id: str | None = None,
    update_baseline: bool = False,
    **keywords: Any,
) -> SweepRun:
    """Begin or continue a sweep, and return it without waiting for its end.

    A process of `python launch/sweep.py` submits the jobs. It outlives this program and writes to sweep.log in the sweep's
    folder. On Slurm it ends once it has submitted all jobs and the check, or once the trials of a search have ended; elsewhere
    it runs all jobs, then the check.

    Args:
        name: a name in recipes/sweeps/, or a path.
        overrides: values by key of the suite or of all recipes, dotted or nested.
        id: the sweep's id; None: today's date. The same sweep with the same id is continued.
        update_baseline: Write the values of this sweep as the new baseline.
        keywords: values by key with `__` for each dot.

    Raises:
        RecipeError: for problems of the suite or of its runs, all at once in `problems`. Nothing is submitted.
    """
    if id is not None and not suites.NAME.fullmatch(id):
        raise RecipeError(suites.bad_name("id", id))
    with naming_arguments(keywords):
        values = arguments(overrides, keywords)
        return begin(suites.load(os.fspath(name), values), os.fspath(name), values, id, update_baseline)


def begin(loaded: LoadedSuite, name: str, values: list[str], id: str | None = None, update_baseline: bool = False) -> SweepRun:
    """Begin or continue a sweep whose suite has been loaded, as `sweep` does. Raises RecipeError.

    name, values: the suite's name and `key=value` arguments, for the command line of the process that submits the jobs.
    """
    sweep_id = id or date.today().isoformat()
    folder = SweepFolder(loaded.folder(sweep_id))
    if folder.begun:
        folder.refuse_other(loaded.suite, loaded.overrides)
    else:
        submission.jobs_of(loaded, folder.path)  # raises RecipeError with the problems of all runs or corners
    with folder.locked(PROBE_S):  # raises RecipeError while another process works on the sweep
        if not update_baseline and (folder.path / "verdict.json").exists():
            return SweepRun(folder.path)
    command = [sys.executable, "-u", str(ROOT / "launch/sweep.py"), f"sweep={name}", f"id={sweep_id}", *values]
    command += ["update_baseline=true"] if update_baseline else []
    return SweepRun(folder.path, _start(command, folder.path / LOG))


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    try:
        output = open(log, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise RecipeError(Problem("folder", "unwritable", f"{log} cannot be written: {error.strerror}")) from None
    with output:
        return start_detached(command, output, audit_log.environment())
