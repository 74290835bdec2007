"""Make the jobs of a suite: one for each run and seed, and the jobs of the recipes that they need.

Seeds are the outer loop, so that runs that gates compare with each other run close in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from launch.recipes import reading
from launch.submission.prepare import Prepared, folder_name, prepare
from launch.sweeps.suite import LoadedSuite, Suite, as_arguments, seeds_of
from launch.sweeps.sweep_folder import SweepJob
from pipeline import config
from pipeline.config import Problem, RecipeError, refuse


def jobs_of(loaded_suite: LoadedSuite, folder: Path) -> tuple[list[SweepJob], str]:
    """Return (the jobs of a suite, the needed recipes first; the executor, slurm or local).

    Raises RecipeError with the problems of all runs.
    """
    suite, problems, jobs, executors = loaded_suite.suite, [], {}, {}
    for run, seed in _seeds_first(suite):
        if run in executors and executors[run] is None:
            continue  # its first seed has reported the problems
        try:
            arguments, prepared = _prepare_run(suite, loaded_suite.overrides, run, seed, folder)
        except RecipeError as error:
            problems += [problem.within(f"run '{run}'") for problem in error.problems]
            executors[run] = None
            continue
        executors[run] = prepared[-1].executor.name
        for job in with_needs(suite.runs[run].recipe or run, arguments, prepared, run, seed):
            jobs.setdefault(job.name, job)
    if len(kinds := set(executors.values()) - {None}) > 1:
        by_run = ", ".join(f"{executor} for '{run}'" for run, executor in executors.items() if executor)
        problems.append(Problem("cluster.executor", "contradiction", f"got {by_run}; expected the same for all runs"))
    refuse([*problems, *not_submitting(kinds)])
    return sorted(jobs.values(), key=lambda job: job.run is not None), kinds.pop()


def not_submitting(executors: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if the executor of a run is this Slurm allocation, in which a sweep cannot submit jobs."""
    if {*executors} - {"slurm", "local"}:
        message = "got allocation; expected slurm or local, since a sweep submits jobs"
        yield Problem("cluster.executor", "not-a-choice", message)


def _seeds_first(suite: Suite) -> list[tuple[str, int]]:
    longest = max(len(seeds_of(suite, run)) for run in suite.runs)
    return [(run, seeds_of(suite, run)[i]) for i in range(longest) for run in suite.runs if i < len(seeds_of(suite, run))]


def _prepare_run(suite: Suite, more: list[str], run: str, seed: int, folder: Path) -> tuple[list[str], list[Prepared]]:
    """Return (a run's overrides, the prepared recipes: needed ones first, then the run's own). Raises RecipeError."""
    recipe = suite.runs[run].recipe or run
    arguments = [*as_arguments(suite.overrides), *as_arguments(suite.runs[run].overrides), *more]
    inspection = reading.inspect(recipe, arguments)
    arguments += [] if "algorithm" in inspection.faulty else [f"{inspection.recipe.algorithm}.seed={seed}"]
    arguments += [f"run_dir={folder / 'runs' / f'{run}-{seed}'}"]
    return arguments, prepare(recipe, arguments)


def with_needs(recipe: str, arguments: list[str], prepared: list[Prepared], run: str, seed: int) -> list[SweepJob]:
    """Return the jobs of the recipes that a run needs, in the run folders that `prepare` chose, then the run's own job."""
    *needed, main = (item.recipe for item in prepared)
    executor = (
        f"cluster.executor={prepared[-1].executor.name}"  # explicit, because the check inside a job would choose another one
    )
    names = [folder_name(recipe) for recipe in needed]
    inherited = {folder_name(item.recipe): item.inherited for item in prepared}
    recipe_of = {config.name_of(need): need for item in prepared for need in item.recipe.needs}

    def needs(recipe: config.Recipe) -> list[str]:
        return [need for need in map(config.name_of, recipe.needs) if need in names]

    first = [
        SweepJob(
            name,
            recipe_of[name],
            [f"run_dir={item.run_dir}", *inherited[name], executor],
            str(Path(item.run_dir).absolute()),
            needs=needs(item),
        )
        for name, item in zip(names, needed, strict=True)
    ]
    return [*first, SweepJob(f"{run}-{seed}", recipe, [*arguments, executor], main.run_dir, run, seed, needs(main))]
