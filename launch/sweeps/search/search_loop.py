"""Run a search: ask the study for trials, submit each once, prune them and record their results, until all have ended.

A trial's job is in sweep.json before it is submitted, and a decision to prune is in the study before it is carried out. So a
search that was killed at any moment continues. A running job is found by its run folder, and a job that was not submitted yet
is submitted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.executors.slurm_client import SlurmError
from launch.submission import run_control
from launch.submission.prepare import examine
from launch.sweeps import expressions, job_submission
from launch.sweeps.queue import Queue
from launch.sweeps.search import objective, space
from launch.sweeps.search.config import SearchConfig
from launch.sweeps.search.trial import Trial
from launch.sweeps.sweep_folder import JobState, SweepFolder, SweepJob
from launch.sweeps.verdict import main_line
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem, RecipeError

if TYPE_CHECKING:
    from launch.sweeps.search.study import TrialStudy

POLL_S = {"local": 0.5, "slurm": 5.0}
"""Executor -> seconds between two checks of the runs."""


@dataclass
class SearchLoop:
    """Runs a search until all trials have ended. Its process holds the lock of the sweep's folder."""

    folder: SweepFolder
    search: SearchConfig
    study: TrialStudy
    overrides: list[str]  # of every trial
    after_end: Callable[[], None]  # called after trials have ended, to write the report

    def run(self) -> None:
        """Run the needed recipes, then all trials, until all have ended.

        Raises RecipeError if a needed run fails, or if Slurm refuses a job.
        """
        self._patiently(self._needed_turn)
        self._patiently(self._turn)

    @functools.cached_property
    def _executor(self) -> str:
        return self.folder.plan.executor

    @functools.cached_property
    def _expression(self) -> expressions.Expression:
        return objective.parse(self.search.metric)

    def _patiently(self, turn: Callable[[], bool]) -> None:
        """Call `turn` again and again while it returns True.

        If Slurm does not answer, print it once and call `turn` again later.
        """
        silent = False
        while True:
            self.folder.refuse_cancelled()
            try:
                if not turn():
                    return
                silent = False
            except RecipeError as error:
                if error.codes != ("unreachable",) or self._executor != "slurm":
                    raise
                if not silent:
                    console.print_field("waits", str(error), f"waits: {on_one_line(str(error))}")
                silent = True
            time.sleep(POLL_S[self._executor])

    # ---- needed recipes -----------------------------------------------------------------------------------------------------

    def _needed_turn(self) -> bool:
        """Start the needed runs that can start, and return whether any of them is live or was started.

        Raises RecipeError if one has failed and has no retries left.
        """
        queue, retries = Queue(self._executor), self.folder.suite.retries
        states = [self.folder.job_state(job, queue) for job in self.folder.plan.jobs if job.run is None]
        complete = {state.job.name for state in states if state.state == "done"}
        ready = [state for state in job_submission.due(states, retries) if complete.issuperset(state.job.needs)]
        for state in ready:
            job_submission.start(self.folder, state)
        live = any(state.state == "live" for state in states)
        if not live and not ready and (failed := [state for state in states if state.state != "done"]):
            reason = main_line(job_submission.why_failed(failed[0]))
            raise RecipeError(
                Problem("search.recipe", "run-failed", f"the run {failed[0].job.name}, which the trials need, failed: {reason}")
            )
        return live or bool(ready)

    # ---- trials -------------------------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Check every running trial, begin others up to `parallel`, and return whether trials are left."""
        queue, jobs = Queue(self._executor), {job.name: job for job in self.folder.plan.jobs}
        before = [entry for entry in self.study.trials() if entry.state == "running"]
        for trial in before:
            if (job := jobs.get(trial.name)) is None:  # its process was killed before it recorded the job
                self._begin(trial)
            else:
                self._look(trial, self.folder.job_state(job, queue))
        trials = self.study.trials()
        live, missing = sum(entry.state == "running" for entry in trials), space.trials(self.search) - len(trials)
        if live < len(before):
            self.after_end()
        for _ in range(min(self.search.parallel - live, missing)):
            self._begin(self.study.ask())
        return live > 0 or missing > 0

    def _begin(self, trial: Trial) -> None:
        """Record a trial's job in sweep.json, then submit it."""
        run_dir = self.folder.path / "runs" / trial.name
        values = [*space.as_overrides(trial.values), f"run_dir={run_dir}", f"cluster.executor={self._executor}"]
        job = SweepJob(trial.name, self.search.recipe, [*self.overrides, *values], str(run_dir), trial.name)
        self.study.note_folder(trial.number, str(run_dir))
        self.folder.add_job(job)
        print(on_one_line(f"{trial.name}: {space.as_text(trial.values)}"), flush=True)
        self._submit(trial, JobState(job, "missing"))

    def _submit(self, trial: Trial, job_state: JobState) -> None:
        """Submit a trial's job. If the trial's own values are refused, the trial fails; any other problem is raised."""
        try:
            job_submission.start(self.folder, job_state)
        except RecipeError:
            job = job_state.job
            if not (problems := examine(job.recipe, job.overrides, dry=True).problems):
                raise
            self._fail(trial, "; ".join(map(str, problems)))

    def _look(self, trial: Trial, job_state: JobState) -> None:
        """Submit a trial, report its metric, or record its end, as the state of its job requires."""
        if job_state.state == "missing":
            self._submit(trial, job_state)
            return
        run_dir = Path(job_state.job.run_dir)
        pruned_at = trial.pruned_at
        if pruned_at is None and job_state.state != "failed":
            pruned_at = self._report(trial, run_dir)
        if job_state.state == "live":
            if pruned_at is not None:
                _ask_to_stop(run_dir, job_state)
        elif job_state.state == "done":
            self._complete(trial, run_dir)
        elif pruned_at is not None:
            self.study.prune(trial.number)
            self._tell(trial, f"pruned at step {pruned_at}")
        else:
            self._fail(trial, main_line(job_submission.why_failed(job_state)))

    def _report(self, trial: Trial, run_dir: Path) -> int | None:
        """Report the metric of each new step to the study.

        Return the step at which the study decides to prune the trial; None if the trial goes on.
        """
        last = max(trial.reports, default=-1)
        for step, value in objective.by_step(self._expression, objective.curves(run_dir), last):
            if self.study.report(trial.number, step, value):
                return step
        return None

    def _complete(self, trial: Trial, run_dir: Path) -> None:
        try:
            value = expressions.evaluate(self._expression, objective.curves(run_dir))
        except expressions.NoValue as error:
            self._fail(trial, str(error))
            return
        if not math.isfinite(value):
            self._fail(trial, f"{self.search.metric} is {value}")
            return
        self.study.complete(trial.number, value)
        self._tell(trial, f"{self.search.metric} {value:.6g}")

    def _fail(self, trial: Trial, reason: str) -> None:
        self.study.fail(trial.number, on_one_line(reason))
        self._tell(trial, f"failed: {reason}")

    def _tell(self, trial: Trial, message: str) -> None:
        console.print_field(trial.name, on_one_line(message), on_one_line(f"{trial.name}: {message}"))


def _ask_to_stop(run_dir: Path, job_state: JobState) -> None:
    """Ask a run to save and stop, without waiting for it.

    Every check of a pruned trial asks again, because its job may have restarted.
    """
    assert job_state.record is not None, "a live job has one"
    with contextlib.suppress(TimeoutError, SlurmError):  # still running; or Slurm does not answer, and the next look asks again
        run_control.stop_and_save(run_dir, job_state.record.attach(run_dir), timeout_s=0)
