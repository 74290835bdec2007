"""Make the jobs of a suite or a search, and submit them: as many at once as the suite allows, and each once.

A suite has a job for each run and seed, and one for each recipe that they need. Seeds are the outer loop, so that runs that
gates compare with each other run close in time. The recipe of a search is checked at the corners of the space, and their plans
price the search.

Under Slurm no process has to stay. Dependencies (`--dependency=afterany`) make each run wait for the run `max_concurrent`
places before it, and make the check wait for all runs. On this machine the process stays, and starts a run when another has
ended. A submitter that is killed at any moment loses nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.executors import slurm, slurm_client, slurm_environment
from launch.executors.executor import ROOT, JobStatus
from launch.plan.estimate import Plan
from launch.recipes import reading
from launch.runs.attempts import latest
from launch.runs.follow import failure
from launch.submission import foreground, run_control
from launch.submission.prepare import Prepared, examine, folder_name, prepare
from launch.sweeps.search_space import SearchConfig, Values, as_text, corners
from launch.sweeps.suite import LoadedSuite, as_arguments
from launch.sweeps.sweep_folder import JobState, Queue, SweepFolder, SweepJob
from launch.terminal import console
from launch.terminal.safe_text import on_one_line
from pipeline import config
from pipeline.config import Problem, RecipeError, collected, refuse

POLL_S = {"local": 0.5, "slurm": 5.0}
"""Executor -> seconds between two checks of the jobs."""
PACKAGES = {"optuna": "5."}  # and the start of the version whose interface and files are known
INSTALL = "pip install '.[search]'"
MOST_PLANS = 4
"""Maximum number of corners that are planned. In a larger space, the lowest and the highest corner are."""
BUDGET = "search.budget_gpu_hours"


# ---- the jobs -----------------------------------------------------------------------------------------------------------


def jobs_of(loaded: LoadedSuite, folder: Path) -> tuple[list[SweepJob], str, Price | None]:
    """Return (the jobs of a suite, the needed recipes first; the executor, slurm or local; the price of a search).

    The jobs of a search are those of the needed recipes. Its price is None if the plan has no times. Raises RecipeError with
    the problems of all runs, or of all corners of the search.
    """
    suite, problems, jobs = loaded.suite, [], {}
    if suite.search is not None:
        return _jobs_of_search(suite.search, suite.overrides_of(suite.search, loaded.overrides), folder)
    executors: dict[str, str | None] = {}  # None: the run has problems
    by_seed = itertools.zip_longest(*([(run, seed) for seed in suite.seeds_of(run)] for run in suite.runs))
    for run, seed in filter(None, itertools.chain.from_iterable(by_seed)):
        if run in executors and executors[run] is None:
            continue  # its first seed has reported the problems
        section = suite.runs[run]
        recipe, arguments = section.recipe or run, suite.overrides_of(section, loaded.overrides)
        try:
            inspection = reading.inspect(recipe, arguments)
            arguments += [] if "algorithm" in inspection.faulty else [f"{inspection.recipe.algorithm}.seed={seed}"]
            arguments += [f"run_dir={folder / 'runs' / f'{run}-{seed}'}"]
            prepared = prepare(recipe, arguments)
        except RecipeError as error:
            problems += [problem.within(f"run '{run}'") for problem in error.problems]
            executors[run] = None
            continue
        executors[run] = prepared[-1].executor.name
        for job in with_needs(recipe, arguments, prepared, run, seed):
            jobs.setdefault(job.name, job)
    kinds = {executor for executor in executors.values() if executor}
    if len(kinds) > 1:
        by_run = ", ".join(f"{executor} for '{run}'" for run, executor in executors.items() if executor)
        problems.append(Problem("cluster.executor", "contradiction", f"got {by_run}; expected the same for all runs"))
    refuse([*problems, *_not_submitting(kinds)])
    return sorted(jobs.values(), key=lambda job: job.run is not None), kinds.pop(), None


def _not_submitting(executors: set[str]) -> Iterator[Problem]:
    """Yield a problem if the executor of a run is this Slurm allocation, in which a sweep cannot submit jobs."""
    if executors - {"slurm", "local"}:
        message = "got allocation; expected slurm or local, since a sweep submits jobs"
        yield Problem("cluster.executor", "not-a-choice", message)


def with_needs(recipe: str, arguments: list[str], prepared: list[Prepared], run: str, seed: int) -> list[SweepJob]:
    """Return the jobs of the recipes that a run needs, in the run folders that `prepare` chose, then the run's own job."""
    executor = f"cluster.executor={prepared[-1].executor.name}"  # the check, inside a job, would choose another one
    names = [folder_name(item.recipe) for item in prepared[:-1]]
    recipe_of = {config.name_of(need): need for item in prepared for need in item.recipe.needs}
    needs = [[need for need in map(config.name_of, item.recipe.needs) if need in names] for item in prepared]
    jobs = []
    for name, item, needed in zip(names, prepared, needs, strict=False):
        overrides = [f"run_dir={item.recipe.run_dir}", *item.inherited, executor]
        jobs.append(SweepJob(name, recipe_of[name], overrides, str(Path(item.recipe.run_dir).absolute()), needs=needed))
    main = prepared[-1].recipe
    return [*jobs, SweepJob(f"{run}-{seed}", recipe, [*arguments, executor], main.run_dir, run, seed, needs[-1])]


# ---- a search before it starts ------------------------------------------------------------------------------------------


def _jobs_of_search(search: SearchConfig, overrides: list[str], folder: Path) -> tuple[list[SweepJob], str, Price | None]:
    """Return (the jobs of needed recipes, the executor, the price) of a new search, as `jobs_of` does."""
    refuse([*package_problems(search), *corner_problems(search, overrides)])
    lowest: list[Prepared] = []
    plans: list[Plan | None] = []
    problems: list[Problem] = []
    known: set[tuple[str, str]] = set()  # (key, code) of problems of earlier corners
    chosen = corners(search)
    for corner in chosen if len(chosen) <= MOST_PLANS else [chosen[0], chosen[-1]]:
        examined = examine(search.recipe, [*overrides, *as_arguments(corner), f"run_dir={folder}/runs/trial-0000"], dry=False)
        of_corner: list[Problem] = []
        with collected(of_corner):
            examined.refuse()
        for problem in of_corner:
            if (problem.key, problem.code) not in known:
                problems.append(_at_parameter(search, problem) if corner is chosen[0] else _of_corner(search, problem, corner))
        known |= {(problem.key, problem.code) for problem in of_corner}
        lowest = lowest or examined.prepared
        plan = examined.prepared[-1].plan if examined.prepared else None
        plans.append(plan if isinstance(plan, Plan) else None)
    price = price_of(search, plans)
    refuse([*budget_problems(search, price), *problems])
    refuse(_pruner_problems(search, run_control.max_steps(lowest[-1].recipe)))
    executor = lowest[-1].executor.name
    refuse(_not_submitting({executor}))
    return with_needs(search.recipe, overrides, lowest, "trial", 0)[:-1], executor, price


def package_problems(search: SearchConfig) -> Iterator[Problem]:
    """Yield a problem if Optuna is missing or has another version, or if sampler=cmaes lacks its package."""
    versions = {**PACKAGES, **({"cmaes": ""} if search.sampler == "cmaes" else {})}
    for package, version in versions.items():
        try:
            present = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            present = "none"
        if present == "none" or not present.startswith(version):
            expected = f"{package} {version}*" if version else package
            yield Problem("search", "not-installed", f"got {present}; expected the package {expected}. Try {INSTALL}")


def _pruner_problems(search: SearchConfig, max_steps: int | None) -> Iterator[Problem]:
    """Yield a problem if the pruner cannot prune anything. max_steps: of a trial; None if only its data bound it."""
    if search.pruner != "none" and max_steps is not None and search.min_steps >= max_steps:
        expected = f"expected less than the {max_steps} steps of a trial, because otherwise no trial is pruned"
        yield Problem("search.min_steps", "too-large", f"got {search.min_steps}; {expected}")
    if search.pruner == "hyperband" and max_steps is None:
        message = "hyperband needs trials with a last step. Try search.pruner=asha, or set max_num_steps"
        yield Problem("search.pruner", "unsupported", message)


# ---- the recipe at the corners ------------------------------------------------------------------------------------------


def corner_problems(search: SearchConfig, overrides: list[str]) -> Iterator[Problem]:
    """Yield the problems of the recipe itself, then the problems that only corners have, each once."""
    base = [fault for fault in reading.inspect(search.recipe, overrides).problems if fault.key not in search.parameters]
    yield from (problem.within("search.recipe") for problem in base)
    reported = {(problem.key, problem.code) for problem in base}
    for corner in corners(search):
        for problem in reading.inspect(search.recipe, [*overrides, *as_arguments(corner)]).problems:
            if (problem.key, problem.code) not in reported:
                yield _of_corner(search, problem, corner)
            reported.add((problem.key, problem.code))


def _of_corner(search: SearchConfig, problem: Problem, corner: Values) -> Problem:
    """Return a problem of a corner as a problem of the parameter that causes it; else it names the values of the corner."""
    at_parameter = _at_parameter(search, problem)
    return at_parameter if at_parameter != problem else problem.within(f"with {as_text(corner)}")


def _at_parameter(search: SearchConfig, problem: Problem) -> Problem:
    """Return a problem with the key that the parameter has in the suite; problems of other keys unchanged.

    An unknown section above a parameter's key also counts as a problem of that parameter.
    """
    is_section = problem.code == "unknown-key"
    for key in search.parameters:
        if key == problem.key or (is_section and key.startswith(f"{problem.key}.")):
            message = problem.message if key == problem.key else f"{problem.key} {problem.message}"
            return replace(problem, key=f"search.parameters.{key}", message=message, origin="")
    return problem


# ---- the budget ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """Holds the price of a search without pruning. Every trial is taken to cost as much as the costliest planned corner."""

    trials: int
    plan: Plan  # of the costliest corner
    trial_gpu_hours: float  # with validations

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all trials."""
        return self.trials * self.trial_gpu_hours

    def __str__(self) -> str:
        steps = f"{self.plan.steps:,} steps of {self.plan.step:.3g} s on {self.plan.gpus} GPUs"
        trial = f"{self.trial_gpu_hours:,.4g} GPU-hours with validations"
        return f"{self.gpu_hours:,.4g} GPU-hours by the plan: {self.trials} trials x {trial} ({steps})"


def price_of(search: SearchConfig, plans: Sequence[Plan | None]) -> Price | None:
    """Return the price of a search by the plans of its corners; None if a plan is missing or has no times or no last step."""
    priced = [(plan.gpu_hours, plan) for plan in plans if plan and plan.phases and plan.gpu_hours is not None]
    if not priced or len(priced) < len(plans):
        return None
    hours, plan = max(priced, key=lambda pair: pair[0])
    return Price(search.number_of_trials, plan, hours)


def budget_problems(search: SearchConfig, price: Price | None) -> Iterator[Problem]:
    """Yield a problem if a search with a budget costs more than that, or if its price is not known."""
    budget = search.budget_gpu_hours
    if budget is None:
        return
    if price is None:
        message = "the plan cannot price a trial without GPUs, a known model and a last step. Try null"
        yield Problem(BUDGET, "has-no-effect", message)
    elif price.gpu_hours > budget:
        most = int(budget / price.trial_gpu_hours)
        cure = f"at most {most} trials" if most else "fewer steps"
        yield Problem(BUDGET, "too-small", f"got {budget:g}; expected at least {price}. Try {cure}, or a larger budget")


# ---- one job ------------------------------------------------------------------------------------------------------------


def due(job_states: list[JobState], retries: int) -> list[JobState]:
    """Return the jobs to submit: missing jobs, and failed jobs with retries left.

    A job is left out if a job that it needs has failed and has no retries left.
    """
    jobs: list[JobState] = []
    usable = {state.job.name for state in job_states if state.state in ("done", "live")}
    for state in job_states:
        is_due = state.state == "missing" or (state.state == "failed" and state.tries <= retries)
        if is_due and usable.issuperset(state.job.needs):
            jobs.append(state)
            usable.add(state.job.name)
    return jobs


def start(folder: SweepFolder, job_state: JobState, after: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> str:
    """Submit one job, and return its id. The submission's output goes into submit.log. Raises RecipeError."""
    folder.refuse_cancelled()
    job = job_state.job
    lines = why_failed(job_state) if job_state.state == "failed" else []
    prepared = prepare(job.recipe, job.overrides)[-1]
    with open(folder.path / "submit.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        handle = foreground.start(prepared, after, behind)
    folder.record(job.name, handle.job_id, lines)
    again = f", again: {lines[0]}" if lines else ""
    print(on_one_line(f"{job.name}: {handle.name()}{again}"), flush=True)
    return handle.job_id


def why_failed(job_state: JobState) -> list[str]:
    """Return the lines of text that say why a job did not complete."""
    job, run_dir = job_state.job, Path(job_state.job.run_dir)
    if job_state.record is None:
        return [f"was not submitted, because {', '.join(job.needs)} failed"] if job.needs else ["was not submitted"]
    if job.needs and latest(run_dir) is None:
        return [f"did not start, because it needs {', '.join(job.needs)} to succeed ({job_state.status})"]
    return failure(run_dir, job_state.record.attach(run_dir), job_state.status or JobStatus("UNKNOWN"))


def main_line(lines: list[str]) -> str:
    """Return the most informative line of a failure: a rank's message, else the last log line, else the first line."""
    messages = [line for line in lines if line.startswith("rank ")]
    log = [line.strip() for line in lines if line.startswith("  ") and line.strip()]
    return (messages or log[-1:] or lines)[0]


# ---- all jobs -----------------------------------------------------------------------------------------------------------


def submit(folder: SweepFolder, own: str | None = None) -> bool:
    """Submit the due jobs to Slurm, and a check that depends on them. Return whether a later check will evaluate the gates.

    If another check waits, failed jobs are left to it. own: the id of this process's job, if it is a check. Raises RecipeError
    if a submission fails. The jobs submitted before go on, and the same command submits the rest.
    """
    now = Queue("slurm")
    job_states = folder.job_states(queue=now)
    checker = folder.check_job(own, now)
    live = [state for state in job_states if state.state == "live"]
    todo = [state for state in due(job_states, folder.suite.retries) if state.state == "missing" or not checker]
    if not live and not todo:
        return checker is not None
    limit = folder.suite.max_concurrent
    ids = {state.job.name: state.record.job_id for state in live if state.record}
    queue = sorted(ids.values(), key=int)
    for state in todo:
        after = tuple(ids[need] for need in state.job.needs if need in ids)
        behind = (queue[-limit],) if len(queue) >= limit else ()
        ids[state.job.name] = start(folder, state, after, behind)
        queue.append(ids[state.job.name])
    if checker and not todo:
        print(f"{len(live)} jobs are active; Slurm job {checker} checks them")
        return True
    waits_for = [state.record.job_id for state in folder.job_states() if state.state == "live" and state.record]
    job_id = _submit_check(folder, waits_for)
    print(f"Slurm job {job_id} checks the gates when {len(waits_for)} jobs have ended", flush=True)
    return True


def _submit_check(folder: SweepFolder, waits_for: list[str]) -> str:
    """Submit the Slurm job that checks the gates, and return its id. Raises RecipeError.

    waits_for: ids of the jobs that must have ended before it starts.
    """
    suite, plan = folder.suite, folder.plan
    recipes = (Path(job.run_dir) / "recipe.yaml" for job in plan.jobs if job.run is not None)
    submitted = next(path for path in recipes if path.exists())  # not all are, if a needed run has failed for good
    first = next(iter(config.components(config.read(submitted)).values()))
    options = {
        "job-name": f"{suite.name}-check",
        "output": folder.path / "check.log",
        "open-mode": "append",
        "chdir": plan.cwd,
        "ntasks": 1,
        "time": suite.check.time_min,
        **{key: getattr(suite.check, key) or getattr(first, key) for key in ("partition", "account", "qos")},
        "mem": suite.check.mem,
        "dependency": slurm.dependency(afterany=tuple(waits_for)),
    }
    command = [sys.executable, "-u", str(ROOT / "launch/sweep.py"), f"check={folder.path}"]
    script = folder.path / "check.sh"
    head = "#!/bin/bash\n# Checks the gates after all runs have ended, and retries failed runs.\n"
    script.write_text(f"{head}{slurm_environment.export_wishes()}exec {shlex.join(command)}\n")
    options |= {key: value for key, value in slurm_environment.wishes().items() if options.get(key) is None}
    flags = [f"--{key}={value}" for key, value in options.items() if value is not None]
    try:
        return slurm_client.submit(script.read_text(), *flags)
    except slurm_client.SlurmError as error:
        if error.kind == "failed":
            message = f"sbatch refused the job that checks the gates: {error.output}"
            raise RecipeError(Problem("check", "refused-by-slurm", message)) from None
        message = f"{error}. Try the same command again; it finds the job if Slurm has accepted it"
        raise RecipeError(Problem("check", "unreachable", message)) from None


def run_jobs(folder: SweepFolder, jobs: list[SweepJob]) -> None:
    """Run jobs, each after those that it needs and with retries, and return when none is left. Raises RecipeError."""
    suite = folder.suite
    printed: dict[str, str] = {}

    def turn() -> bool:
        job_states = folder.job_states(jobs)
        print_changes(job_states, printed)
        complete = {state.job.name for state in job_states if state.state == "done"}
        live = sum(state.state == "live" for state in job_states)
        todo = due(job_states, suite.retries)
        startable = [state for state in todo if complete.issuperset(state.job.needs)]
        for state in startable[: max(0, suite.max_concurrent - live)]:
            start(folder, state)
        return bool(live or todo)

    repeat(folder, turn)


def repeat(folder: SweepFolder, turn: Callable[[], bool]) -> None:
    """Call `turn` again and again while it returns True.

    If Slurm does not answer, print it once and call `turn` again later. Raises RecipeError if the sweep is cancelled.
    """
    silent, executor = False, folder.plan.executor
    while True:
        folder.refuse_cancelled()
        try:
            if not turn():
                return
            silent = False
        except RecipeError as error:
            if error.codes != ("unreachable",) or executor != "slurm":
                raise
            if not silent:
                console.print_field("waits", str(error), f"waits: {on_one_line(str(error))}")
            silent = True
        time.sleep(POLL_S[executor])


def print_changes(job_states: list[JobState], printed: dict[str, str]) -> None:
    """Print a line for each job whose state differs from its state in `printed`, and update `printed`."""
    for state in job_states:
        now = state.state if state.status is None else f"{state.state}, {state.status}"
        if state.state != "missing" and printed.get(state.job.name) != now:
            printed[state.job.name] = now
            console.print_field(state.job.name, on_one_line(now), on_one_line(f"{state.job.name}: {now}"))
