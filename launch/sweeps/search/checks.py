"""Check a search before it starts: Optuna, the recipe at the corners of the space, the budget, the pruner."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.plan.estimate import Plan
from launch.recipes import reading
from launch.submission.prepare import Prepared, examine
from launch.sweeps import submission
from launch.sweeps.search.section import SearchConfig, Values, as_arguments, as_text, corners
from launch.sweeps.suite import LoadedSuite, trial_overrides
from launch.sweeps.sweep_folder import SweepJob
from pipeline.config import Problem, bound, collected, refuse, section

PACKAGES = {"optuna": "5."}  # and the start of the version whose interface and files are known
INSTALL = "pip install 'hetstep[search]'"
MOST_PLANS = 4
"""Maximum number of corners that are planned. In a larger space, the lowest and the highest corner are."""
BUDGET = "search.budget_gpu_hours"


def check(loaded: LoadedSuite, folder: Path) -> tuple[list[SweepJob], str, Price | None]:
    """Return (the jobs of needed recipes, the executor, the price; None if the plan has no times) of a new search.

    Raises RecipeError with all problems; writes nothing.
    """
    search, overrides = loaded.suite.search, trial_overrides(loaded.suite, loaded.overrides)
    assert search is not None, "the caller has looked"
    refuse([*package_problems(search), *corner_problems(search, overrides)])
    lowest: list[Prepared] = []
    plans: list[Plan | None] = []
    problems: list[Problem] = []
    chosen = corners(search)
    for corner in chosen if len(chosen) <= MOST_PLANS else [chosen[0], chosen[-1]]:
        is_lowest = corner is chosen[0]
        arguments = [*overrides, *as_arguments(corner), *([f"run_dir={folder / 'runs' / 'trial-0000'}"] if is_lowest else [])]
        examined = examine(search.recipe, arguments, dry=not is_lowest)
        if is_lowest:
            lowest = examined.prepared
            with collected(problems):
                examined.refuse()
            problems = [_at_parameter(search, problem) for problem in problems]
        else:
            of_corner = [_of_corner(search, problem, corner) for problem in examined.problems]
            reported = {(problem.key, problem.code) for problem in problems}
            problems += [problem for problem in of_corner if (problem.key, problem.code) not in reported]
        plan = examined.prepared[-1].plan if examined.prepared else None
        plans.append(plan if isinstance(plan, Plan) else None)
    price = price_of(search, plans)
    refuse([*budget_problems(search, price), *problems])
    refuse([*_pruner_problems(search, bound(section(lowest[-1].recipe).max_num_steps))])
    executor = lowest[-1].executor.name
    refuse(submission.not_submitting({executor}))
    return submission.with_needs(search.recipe, overrides, lowest, "trial", 0)[:-1], executor, price


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
            return dataclasses.replace(problem, key=f"search.parameters.{key}", message=message, origin="")
    return problem


# ---- the budget ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
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
    hours = [plan.gpu_hours if plan and plan.phases and plan.steps is not None else None for plan in plans]
    priced = [(of_plan, plan) for of_plan, plan in zip(hours, plans, strict=True) if of_plan is not None and plan is not None]
    if not priced or len(priced) < len(plans):
        return None
    most, plan = max(priced, key=lambda pair: pair[0])
    return Price(search.number_of_trials, plan, most)


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
