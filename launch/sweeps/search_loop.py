"""Run the search of a suite: ask Optuna for trials, submit each once, prune them and record their results.

The study is a journal in the sweep's folder, which only the process that holds the folder's lock writes. Each trial gets a new
sampler with a seed of its own, so a search that was killed continues with the same draws.

A trial's job is in sweep.json before it is submitted, and a decision to prune is in the study before it is carried out. So a
search that was killed at any moment continues. A running job is found by its run folder, and a job that was not submitted yet
is submitted. The results are report.html and, at the end, verdict.json.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.executors.slurm_client import SlurmError
from launch.pages.document import add_plotly
from launch.recipes import reading
from launch.recipes.trust import Trust, trusting
from launch.submission import run_control
from launch.submission.prepare import examine
from launch.sweeps import search_report, submission
from launch.sweeps.expressions import Curve, Expression, NoValue, curves
from launch.sweeps.search_report import SearchResult, StateOfTrial, Trial
from launch.sweeps.search_space import ParameterConfig, SearchConfig, as_text, grid, is_whole
from launch.sweeps.suite import as_arguments
from launch.sweeps.sweep_folder import JobState, SweepFolder, SweepJob
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem, RecipeError, refuse
from pipeline.files import small_files
from pipeline.files.storage import write_durably
from pipeline.observe import metrics

JOURNAL = "search.journal"
STUDY = "search"
STREAM = 1_000_003  # distance of the seeds of two searches, above their numbers of trials
RANDOM_FIRST = 10
"""Maximum number of random trials before the Parzen estimator chooses."""
WHY, PRUNED_AT = "why", "pruned at"
"""Attributes of a trial."""
STATES: dict[str, StateOfTrial] = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
"""Optuna's name of a trial's state -> ours."""


def _optuna() -> Any:
    """Return Optuna, an optional package whose import takes a second."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ---- the study ----------------------------------------------------------------------------------------------------------


class TrialStudy:
    """Holds the trials of one search."""

    def __init__(self, folder: Path, search: SearchConfig, max_steps: int | None):
        """Open the study in a sweep's folder, or create it. Remove what a killed process left.

        max_steps: the number of steps of a trial; None if only its data limit it.
        """
        optuna = _optuna()
        self._search, self._max_steps = search, max_steps
        self._distributions = {key: _distribution(key, parameter) for key, parameter in search.parameters.items()}
        path = folder / JOURNAL
        Path(f"{path}.lock").unlink(missing_ok=True)
        if path.exists() and not (text := path.read_text()).endswith("\n") and text:
            write_durably(path, text[: text.rfind("\n") + 1])  # without the incomplete line, on which Optuna would fail
        self._storage = _storage(path)
        self._study = optuna.create_study(
            storage=self._storage,
            pruner=_pruner(search, max_steps),
            study_name=STUDY,
            direction=search.direction,
            load_if_exists=True,
        )
        for trial in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if trial.params.keys() != search.parameters.keys():  # a process was killed while it asked; it was never submitted
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def trials(self) -> list[Trial]:
        """Return all trials that have all their values, in order."""
        return _trials(self._study, self._search)

    def ask(self) -> Trial:
        """Return a new trial: the next point of the grid, or values that the sampler chose."""
        if self._search.sampler == "grid":
            values, create_trial = grid(self._search)[len(self.trials())], _optuna().trial.create_trial
            running = _optuna().trial.TrialState.RUNNING
            self._study.add_trial(create_trial(state=running, params=values, distributions=self._distributions))
        else:
            self._study.sampler = _sampler(self._search, len(self._study.get_trials(deepcopy=False)))
            self._study.ask(self._distributions)
        return self.trials()[-1]

    def handle(self, number: int) -> Any:
        """Return Optuna's object for reports and attributes of a running trial. Optuna's own tools show the attributes too."""
        study_id = self._storage.get_study_id_from_name(STUDY)
        return _optuna().trial.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def report(self, number: int, step: int, value: float) -> bool:
        """Record the metric of a running trial at a step, and return whether to prune the trial.

        A decision to prune is recorded too. No trial is pruned at its last step.
        """
        trial = self.handle(number)
        trial.report(value, step)
        if (self._max_steps is not None and step >= self._max_steps) or not trial.should_prune():
            return False
        trial.set_user_attr(PRUNED_AT, step)
        return True

    def end(self, number: int, state: StateOfTrial, value: float | None = None) -> None:
        """Record the end of a trial: complete with its final metric, pruned at the last value that it reported, or failed."""
        name = next(name for name, ours in STATES.items() if ours == state)
        self._study.tell(number, value, _optuna().trial.TrialState[name])

    def importances(self) -> dict[str, float]:
        """Return parameter -> its share of the importance, largest first.

        Return {} if all complete trials have the same value, or if there are fewer than two. The shares are by PED-ANOVA
        (https://arxiv.org/abs/2304.10255), which needs no further package, unlike fANOVA.
        """
        distinct = {trial.value for trial in self.trials() if trial.state == "complete"}
        return dict(_optuna().importance.get_param_importances(self._study)) if len(distinct) > 1 else {}


def trials_of(folder: SweepFolder) -> list[Trial]:
    """Return the trials of a search that has begun, in their current state. Raises RecipeError if Optuna is missing.

    The study is only read, because another process may be running the search.
    """
    search, path = folder.suite.search, folder.path / JOURNAL
    assert search is not None, "the caller has looked"
    refuse(submission.package_problems(search))
    with contextlib.suppress(KeyError):  # the journal has no study yet
        return _trials(_optuna().load_study(study_name=STUDY, storage=_storage(path)), search) if path.exists() else []
    return []


def _storage(journal: Path) -> Any:
    storages = _optuna().storages
    return storages.JournalStorage(storages.journal.JournalFileBackend(str(journal)))


def _trials(study: Any, search: SearchConfig) -> list[Trial]:
    """Return the trials of a study that have all their values, in order."""
    trials = study.get_trials(deepcopy=False)
    return [_trial(trial) for trial in trials if trial.state.name in STATES and trial.params.keys() == search.parameters.keys()]


def _trial(trial: Any) -> Trial:
    attributes, state = trial.user_attrs, STATES[trial.state.name]
    value = trial.value if state in ("complete", "pruned") else None
    return Trial(
        number=trial.number,
        state=state,
        values=dict(trial.params),
        reports=dict(sorted(trial.intermediate_values.items())),
        value=None if value is None or math.isnan(value) else value,
        why=attributes.get(WHY, ""),
        pruned_at=attributes.get(PRUNED_AT),
    )


def _distribution(key: str, parameter: ParameterConfig) -> Any:
    distributions = _optuna().distributions
    if parameter.choices is not None:
        return distributions.CategoricalDistribution(parameter.choices)
    low, high, step = parameter.low, parameter.high, parameter.step
    assert low is not None and high is not None, "`suite.problems` requires them"
    if is_whole(key, parameter):
        return distributions.IntDistribution(int(low), int(high), parameter.log, int(step or 1))
    return distributions.FloatDistribution(low, high, parameter.log, step)


def _sampler(search: SearchConfig, earlier: int) -> Any:
    """Return the sampler of the next trial. earlier: the number of trials before it."""
    samplers, seed = _optuna().samplers, search.seed * STREAM + earlier
    if search.sampler == "tpe":
        first = min(RANDOM_FIRST, max(1, search.number_of_trials // 4))
        return samplers.TPESampler(seed=seed, n_startup_trials=first)
    return samplers.CmaEsSampler(seed=seed) if search.sampler == "cmaes" else samplers.RandomSampler(seed=seed)


def _pruner(search: SearchConfig, max_steps: int | None) -> Any:
    pruners, first, factor = _optuna().pruners, search.min_steps, search.reduction_factor
    if search.pruner == "asha":
        return pruners.SuccessiveHalvingPruner(first, factor)
    if search.pruner == "hyperband":
        return pruners.HyperbandPruner(first, max_steps or "auto", factor)
    return pruners.MedianPruner(n_warmup_steps=first) if search.pruner == "median" else pruners.NopPruner()


# ---- the commands -------------------------------------------------------------------------------------------------------


def run(folder: SweepFolder) -> int:
    """Run a search that has begun, wait for its end, and return the exit status: 0 if any trial is complete, else 1.

    The caller holds the folder's lock. Raises RecipeError.
    """
    begun = BegunSearch(folder)
    begun.run()
    result = begun.write_page()
    best = result.best
    value = {
        "passed": best is not None,
        "summary": result.summary,
        "judged": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdicts": [],
        "best": best.as_json() if best else None,
        "importances": dict(result.importances),
        "trials": [entry.as_json() for entry in result.trials],
    }
    small_files.write(result.folder / "verdict.json", value)
    print(result.summary)
    if best:
        print(f"best: {result.search.metric} {best.trial.value:.6g} of {best.trial.name}")
        print(result.command(best))
    print(f"{result.folder}/report.html", flush=True)
    return 0 if best else 1


def report(folder: SweepFolder) -> int:
    """Write the report of a search in its current state. Return 0 if any trial is complete, else 1. Raises RecipeError."""
    result = BegunSearch(folder).write_page()
    print(f"{result.summary}\n{folder.path}/report.html")
    return 0 if result.best else 1


def show(folder: SweepFolder) -> None:
    """Print the trials of a search that has begun, each with its recipe and its result."""
    outcomes = {outcome.name: outcome for outcome in trials_of(folder)}
    for job in folder.plan.jobs:
        trial = outcomes.get(job.name)
        ending = f"  {trial.state}{'' if trial.value is None else f' {trial.value:.6g}'}" if trial else ""
        print(f"{job}{ending}")


# ---- the loop -----------------------------------------------------------------------------------------------------------


def values_by_step(expression: Expression, of_run: Mapping[str, Curve], after: int = -1) -> Iterator[tuple[int, float]]:
    """Yield (step, value of the expression over the run's steps so far), for steps > `after`.

    Only steps at which a metric of the expression was recorded count. Steps where the expression has no value yet are left out,
    such as those before `last=10` has ten values. The value is NaN where a metric is not finite.
    """
    read = {name: of_run[name] for name in expression.metrics if name in of_run}
    for step in sorted({step for curve in read.values() for step in curve.steps if step > after}):
        counts = {name: bisect.bisect_right(curve.steps, step) for name, curve in read.items()}
        so_far = {name: Curve(read[name].steps[:count], read[name].values[:count]) for name, count in counts.items() if count}
        if any((curve.steps[-1], curve.values[-1]) == (step, None) for curve in so_far.values()):
            yield step, math.nan
            continue
        with contextlib.suppress(NoValue):
            yield step, expression.value(so_far)


class BegunSearch:
    """A search that has begun. The process that runs it holds the lock of the sweep's folder."""

    def __init__(self, folder: SweepFolder):
        """Open the study in the folder. Raises RecipeError."""
        self._folder, self._suite, plan = folder, folder.suite, folder.plan
        assert self._suite.search is not None, "the caller has looked"
        self._executor, self._search = plan.executor, self._suite.search
        self._overrides = self._suite.overrides_of(self._search, plan.overrides)
        refuse(submission.package_problems(self._search))
        with trusting(Trust.EVERYTHING):  # it was submitted
            recipe = reading.load(self._search.recipe, self._overrides)
        self._max_steps = run_control.max_steps(recipe)  # of a trial; None if only its data bound it
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
        """Record a trial's job in sweep.json, then submit it.

        If the trial's own values are refused, the trial fails; any other problem is raised.
        """
        run_dir = self._folder.path / "runs" / trial.name
        values = [*as_arguments(trial.values), f"run_dir={run_dir}", f"cluster.executor={self._executor}"]
        job = SweepJob(trial.name, self._search.recipe, [*self._overrides, *values], str(run_dir), trial.name)
        self._study.handle(trial.number).set_user_attr("run_dir", str(run_dir))
        self._folder.add_job(job)
        print(on_one_line(f"{trial.name}: {as_text(trial.values)}"), flush=True)
        try:
            submission.start(self._folder, JobState(job, "missing"))
        except RecipeError:
            if not (problems := examine(job.recipe, job.overrides, dry=True).problems):
                raise
            self._fail(trial, "; ".join(map(str, problems)))

    def _look(self, trial: Trial, job_state: JobState) -> None:
        """Submit a trial, report its metric, or record its end, as the state of its job requires."""
        if job_state.state == "missing":
            self._begin(trial)
            return
        run_dir, pruned_at = Path(job_state.job.run_dir), trial.pruned_at
        of_run = {} if job_state.state == "failed" else curves(metrics.read(run_dir / "metrics.jsonl"))
        if pruned_at is None:
            reports = values_by_step(self._expression, of_run, max(trial.reports, default=-1))
            pruned_at = next((step for step, value in reports if self._study.report(trial.number, step, value)), None)
        if job_state.state == "live":
            if pruned_at is not None:
                _ask_to_stop(run_dir, job_state)
        elif job_state.state == "done":
            self._complete(trial, of_run)
        elif pruned_at is not None:
            self._end(trial, "pruned", f"pruned at step {pruned_at}")
        else:
            self._fail(trial, submission.main_line(submission.why_failed(job_state)))

    def _complete(self, trial: Trial, of_run: Mapping[str, Curve]) -> None:
        try:
            value = self._expression.value(of_run)
        except NoValue as error:
            self._fail(trial, str(error))
            return
        if not math.isfinite(value):
            self._fail(trial, f"{self._search.metric} is {value}")
            return
        self._end(trial, "complete", f"{self._search.metric} {value:.6g}", value)

    def _fail(self, trial: Trial, reason: str) -> None:
        self._study.handle(trial.number).set_user_attr(WHY, on_one_line(reason))
        self._end(trial, "failed", f"failed: {reason}")

    def _end(self, trial: Trial, state: StateOfTrial, message: str, value: float | None = None) -> None:
        """Record the end of a trial, and print it."""
        self._study.end(trial.number, state, value)
        console.print_field(trial.name, on_one_line(message), on_one_line(f"{trial.name}: {message}"))


def _ask_to_stop(run_dir: Path, job_state: JobState) -> None:
    """Ask a run to save and stop, without waiting for it.

    Every check of a pruned trial asks again, because its job may have restarted.
    """
    assert job_state.record is not None, "a live job has one"
    with contextlib.suppress(TimeoutError, SlurmError):  # still running; or Slurm does not answer, and the next look asks again
        run_control.stop_and_save(run_dir, job_state.record.attach(run_dir), timeout_s=0)
