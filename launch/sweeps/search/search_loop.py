"""Run the search of a suite: ask the study for trials, submit each once, prune them and record their results.

A trial's job is in sweep.json before it is submitted, and a decision to prune is in the study before it is carried out. So a
search that was killed at any moment continues. A running job is found by its run folder, and a job that was not submitted yet
is submitted. The results are report.html and, at the end, verdict.json.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from launch.executors.slurm_client import SlurmError
from launch.pages.document import add_plotly
from launch.recipes import reading
from launch.submission import run_control
from launch.submission.prepare import Prepared, examine
from launch.sweeps import measurements, submission
from launch.sweeps import verdict as verdicts
from launch.sweeps.expressions import Curve, Expression, NoValue
from launch.sweeps.search import checks, search_report
from launch.sweeps.search.checks import Price
from launch.sweeps.search.search_report import SearchResult, Trial, TrialResult
from launch.sweeps.search.section import SearchConfig, as_arguments, as_text, corners
from launch.sweeps.suite import LoadedSuite, Suite
from launch.sweeps.sweep_folder import PROBE_S, JobState, SweepFolder, SweepJob, SweepPlan
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem, RecipeError, bound, refuse, section
from pipeline.files import small_files
from pipeline.files.storage import write_durably
from pipeline.observe import metrics

POLL_S = {"local": 0.5, "slurm": 5.0}
"""Executor -> seconds between two checks of the runs."""


def check(loaded: LoadedSuite, folder: SweepFolder) -> tuple[list[Prepared], Price | None]:
    """Check a search that has not begun. Raises RecipeError with all problems; writes nothing.

    Return (the runs of the lowest corner, needed ones first; the price, None if the plan has no times).
    """
    search, overrides = _search(loaded.suite, loaded.overrides)
    return checks.check(search, overrides, f"run_dir={folder.path / 'runs' / 'trial-0000'}")


def begin(loaded: LoadedSuite, folder: SweepFolder, dry_run: bool = False, update_baseline: bool = False) -> int:
    """Begin or continue a search, wait for its end, and return the exit status: 0 if any trial is complete, else 1.

    dry_run: only print the search, and write nothing. update_baseline: must be False, because a search has no baseline. Raises
    RecipeError.
    """
    if update_baseline:
        raise RecipeError(Problem("update_baseline", "has-no-effect", "a search has no gates, and so no baseline"))
    search, overrides = _search(loaded.suite, loaded.overrides)
    refuse(checks.package_problems(search))
    lowest, price = ([], None) if folder.begun else check(loaded, folder)
    if dry_run:
        _show(folder, search, overrides, price)
        return 0
    with folder.locked(PROBE_S):
        folder.take_up()
        if lowest and folder.begun:  # by another process, meanwhile
            folder.refuse_other(loaded.suite, loaded.overrides)
        elif lowest:
            needed = submission.with_needs(search.recipe, overrides, lowest, "trial", 0)[:-1]
            executor = lowest[-1].executor.name
            folder.begin(loaded.suite, SweepPlan(folder.path.name, executor, str(Path.cwd()), "", loaded.overrides, needed))
        if (over := verdicts.read(folder.path)) is not None:
            print(f"{over['summary']}\n{folder.path} is complete; id=NAME begins another search")
            return 0 if over["passed"] else 1
        print(f"{folder.title}: {search.number_of_trials} trials, {search.parallel} at once, in {folder.path}", flush=True)
        if price:
            print(price, flush=True)
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
    search, _ = _search(folder.suite, [])
    refuse(checks.package_problems(search))
    from launch.sweeps.search import study  # imports Optuna, an optional package

    return study.snapshot(folder.path, search)


def _search(suite: Suite, command_line: list[str]) -> tuple[SearchConfig, list[str]]:
    """Return (the section `search`; the overrides of every trial: the suite's, the section's and the command line's)."""
    assert suite.search is not None, "the caller has looked"
    return suite.search, [*as_arguments(suite.overrides), *as_arguments(suite.search.overrides), *command_line]


def _show(folder: SweepFolder, search: SearchConfig, overrides: list[str], price: Price | None) -> None:
    """Print a search: before it begins, its price and its corners; afterwards, each trial with its recipe and result."""
    number = search.number_of_trials
    print(f"{folder.title}: {number} trials by {search.sampler}, {search.parallel} at once, in {folder.path}")
    if not folder.begun:
        print(price or "its price is not known: the plan has no times")
        for corner in corners(search):
            print(f"corner: recipe={search.recipe} {' '.join([*overrides, *as_arguments(corner)])}")
        return
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
    measured = {"name": entry.trial.name, "seconds": entry.seconds, "devices": entry.devices}
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
        self._executor = plan.executor
        self._search, self._overrides = _search(self._suite, plan.overrides)
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
        self._patiently(self._needed_turn)
        self._patiently(self._turn)

    def _patiently(self, turn: Callable[[], bool]) -> None:
        """Call `turn` again and again while it returns True.

        If Slurm does not answer, print it once and call `turn` again later.
        """
        silent = False
        while True:
            self._folder.refuse_cancelled()
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

    def _needed_turn(self) -> bool:
        """Start the needed runs that can start, and return whether any of them is live or was started.

        Raises RecipeError if one has failed and has no retries left.
        """
        states = self._folder.job_states([job for job in self._folder.plan.jobs if job.run is None])
        ready = submission.startable(states, self._suite.retries)
        for state in ready:
            submission.start(self._folder, state)
        if ready or any(state.state == "live" for state in states):
            return True
        if failed := [state for state in states if state.state != "done"]:
            reason = submission.main_line(submission.why_failed(failed[0]))
            message = f"the run {failed[0].job.name}, which the trials need, failed: {reason}"
            raise RecipeError(Problem("search.recipe", "run-failed", message))
        return False

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
        self._study.note_folder(trial.number, str(run_dir))
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
            self._study.prune(trial.number)
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
        self._study.complete(trial.number, value)
        self._tell(trial, f"{self._search.metric} {value:.6g}")

    def _fail(self, trial: Trial, reason: str) -> None:
        self._study.fail(trial.number, on_one_line(reason))
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
