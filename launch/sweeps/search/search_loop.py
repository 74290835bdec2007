"""Run the search of a suite: ask the study for trials, submit each once, prune them and record their results.

A trial's job is in sweep.json before it is submitted, and a decision to prune is in the study before it is carried out. So a
search that was killed at any moment continues. A running job is found by its run folder, and a job that was not submitted yet
is submitted. The results are report.html and, at the end, verdict.json.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from launch.executors.slurm_client import SlurmError
from launch.pages.document import add_plotly
from launch.recipes import reading
from launch.submission import run_control
from launch.submission.prepare import examine
from launch.sweeps import measurements, submission
from launch.sweeps.expressions import Curve, Expression, NoValue
from launch.sweeps.search import checks, search_report
from launch.sweeps.search.search_report import SearchResult, Trial, TrialResult
from launch.sweeps.search.section import as_arguments, as_text
from launch.sweeps.suite import trial_overrides
from launch.sweeps.sweep_folder import JobState, SweepFolder, SweepJob
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem, RecipeError, bound, refuse, section
from pipeline.files import small_files
from pipeline.files.storage import write_durably
from pipeline.observe import metrics


def run(folder: SweepFolder) -> int:
    """Run a search that has begun, wait for its end, and return the exit status: 0 if any trial is complete, else 1.

    The caller holds the folder's lock. Raises RecipeError.
    """
    begun = BegunSearch(folder)
    begun.run()
    return _conclude(begun.write_page())


def report(folder: SweepFolder) -> int:
    """Write the report of a search in its current state. Return 0 if any trial is complete, else 1. Raises RecipeError."""
    result = BegunSearch(folder).write_page()
    print(f"{result.summary}\n{folder.path}/report.html")
    return 0 if result.best else 1


def trials_of(folder: SweepFolder) -> list[Trial]:
    """Return the trials of a search that has begun, in their current state. Raises RecipeError if Optuna is missing."""
    search = folder.suite.search
    assert search is not None, "the caller has looked"
    refuse(checks.package_problems(search))
    from launch.sweeps.search import study  # imports Optuna, an optional package

    return study.snapshot(folder.path, search)


def show(folder: SweepFolder) -> None:
    """Print the trials of a search that has begun, each with its recipe and its result."""
    outcomes = {outcome.name: outcome for outcome in trials_of(folder)}
    for job in folder.plan.jobs:
        trial = outcomes.get(job.name)
        ending = f"  {trial.state}{'' if trial.value is None else f' {trial.value:.6g}'}" if trial else ""
        print(f"{job.name}: recipe={job.recipe} {' '.join(job.overrides)}{ending}")


def _conclude(result: SearchResult) -> int:
    """Write verdict.json of a search whose trials have ended, and return the exit status."""
    best = result.best
    value = {
        "passed": best is not None,
        "summary": result.summary,
        "judged": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdicts": [],
        "best": _as_json(best) if best else None,
        "importances": dict(result.importances),
        "trials": [_as_json(entry) for entry in result.trials],
    }
    small_files.write(result.folder / "verdict.json", value)
    print(result.summary)
    if best:
        print(f"best: {result.search.metric} {best.trial.value:.6g} of {best.trial.name}")
        print(f"python launch/submit.py recipe={result.search.recipe} {' '.join(as_arguments(best.trial.values))}")
    print(f"{result.folder}/report.html", flush=True)
    return 0 if best else 1


def _as_json(entry: TrialResult) -> dict[str, object]:
    reports = {step: value if math.isfinite(value) else None for step, value in entry.trial.reports.items()}
    measured = {"name": entry.trial.name, "seconds": entry.measured.seconds, "devices": entry.devices}
    return {**asdict(entry.trial), "reports": reports, **measured}


# ---- the metric ---------------------------------------------------------------------------------------------------------


def values_by_step(expression: Expression, curves: Mapping[str, Curve], after: int = -1) -> Iterator[tuple[int, float]]:
    """Yield (step, value of the expression over the run's steps so far), for steps > `after`.

    Only steps at which a metric of the expression was recorded count. Steps where the expression has no value yet are left out,
    such as those before `last=10` has ten values. The value is NaN where a metric is not finite.
    """
    read = {name: curves[name] for name in expression.metrics if name in curves}
    for step in sorted({step for curve in read.values() for step in curve.steps if step > after}):
        so_far = {name: _until(curve, step) for name, curve in read.items()}
        if any(curve.steps and (curve.steps[-1], curve.values[-1]) == (step, None) for curve in so_far.values()):
            yield step, math.nan
            continue
        with contextlib.suppress(NoValue):
            yield step, expression.value({name: curve for name, curve in so_far.items() if curve.steps})


def _curves(run_dir: Path) -> dict[str, Curve]:
    return measurements.curves(metrics.read(run_dir / "metrics.jsonl"))


def _until(curve: Curve, step: int) -> Curve:
    count = sum(other <= step for other in curve.steps)
    return Curve(curve.steps[:count], curve.values[:count])


# ---- the loop -----------------------------------------------------------------------------------------------------------


class BegunSearch:
    """A search that has begun. The process that runs it holds the lock of the sweep's folder."""

    def __init__(self, folder: SweepFolder):
        """Open the study in the folder. Raises RecipeError."""
        self._folder, self._suite, plan = folder, folder.suite, folder.plan
        assert self._suite.search is not None, "the caller has looked"
        self._executor, self._search = plan.executor, self._suite.search
        self._overrides = trial_overrides(self._suite, plan.overrides)
        refuse(checks.package_problems(self._search))
        from launch.sweeps.search.study import TrialStudy  # imports Optuna, an optional package

        recipe = reading.load(self._search.recipe, self._overrides)
        self._max_steps = bound(section(recipe).max_num_steps)  # of a trial; None if only its data bound it
        self._study = TrialStudy(folder.path, self._search, self._max_steps)
        self._expression = self._search.expression

    def write_page(self) -> SearchResult:
        """Write report.html, with Plotly's script beside it, and return the result with the trials in their current state."""
        current, importances = self._study.trials(), self._study.importances()
        result = search_report.result(self._folder, self._search, current, importances, self._max_steps)
        write_durably(self._folder.path / "report.html", search_report.page(result, self._suite))
        add_plotly(self._folder.path)
        return result

    def run(self) -> None:
        """Run the needed recipes, then all trials, until all have ended.

        Raises RecipeError if a needed run fails, or if Slurm refuses a job.
        """
        needed = [job for job in self._folder.plan.jobs if job.run is None]
        submission.run_jobs(self._folder, needed)
        if failed := [state for state in self._folder.job_states(needed) if state.state != "done"]:
            reason = submission.main_line(submission.why_failed(failed[0]))
            message = f"the run {failed[0].job.name}, which the trials need, failed: {reason}"
            raise RecipeError(Problem("search.recipe", "run-failed", message))
        submission.repeat(self._folder, self._turn)

    def _turn(self) -> bool:
        """Check every running trial, begin others up to `parallel`, and return whether trials are left."""
        jobs = {job.name: job for job in self._folder.plan.jobs}
        before = {entry.name: entry for entry in self._study.trials() if entry.state == "running"}
        for trial in before.values():
            if trial.name not in jobs:  # its process was killed before it recorded the job
                self._begin(trial)
        for state in self._folder.job_states([job for name, job in jobs.items() if name in before]):
            self._look(before[state.job.name], state)
        present = self._study.trials()
        live, missing = sum(entry.state == "running" for entry in present), self._search.number_of_trials - len(present)
        if live < len(before):
            self.write_page()
        for _ in range(min(self._search.parallel - live, missing)):
            self._begin(self._study.ask())
        return live > 0 or missing > 0

    def _begin(self, trial: Trial) -> None:
        """Record a trial's job in sweep.json, then submit it."""
        run_dir = self._folder.path / "runs" / trial.name
        values = [*as_arguments(trial.values), f"run_dir={run_dir}", f"cluster.executor={self._executor}"]
        job = SweepJob(trial.name, self._search.recipe, [*self._overrides, *values], str(run_dir), trial.name)
        self._study.mark(trial.number, "run_dir", str(run_dir))
        self._folder.add_job(job)
        print(on_one_line(f"{trial.name}: {as_text(trial.values)}"), flush=True)
        self._submit(trial, JobState(job, "missing"))

    def _submit(self, trial: Trial, job_state: JobState) -> None:
        """Submit a trial's job. If the trial's own values are refused, the trial fails; any other problem is raised."""
        try:
            submission.start(self._folder, job_state)
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
            self._study.end(trial.number, "pruned")
            self._tell(trial, f"pruned at step {pruned_at}")
        else:
            self._fail(trial, submission.main_line(submission.why_failed(job_state)))

    def _report(self, trial: Trial, run_dir: Path) -> int | None:
        """Report the metric of each new step to the study.

        Return the step at which the study decides to prune the trial; None if the trial goes on.
        """
        for step, value in values_by_step(self._expression, _curves(run_dir), max(trial.reports, default=-1)):
            if self._study.report(trial.number, step, value):
                return step
        return None

    def _complete(self, trial: Trial, run_dir: Path) -> None:
        try:
            value = self._expression.value(_curves(run_dir))
        except NoValue as error:
            self._fail(trial, str(error))
            return
        if not math.isfinite(value):
            self._fail(trial, f"{self._search.metric} is {value}")
            return
        self._study.end(trial.number, "complete", value)
        self._tell(trial, f"{self._search.metric} {value:.6g}")

    def _fail(self, trial: Trial, reason: str) -> None:
        self._study.end(trial.number, "failed", why=on_one_line(reason))
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
