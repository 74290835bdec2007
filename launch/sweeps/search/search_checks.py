"""Check a search before it starts: Optuna, the recipe at the corners of the space, the budget, the pruner."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.plan.estimate import Plan
from launch.recipes import reading
from launch.submission.prepare import Prepared, examine, prepare
from launch.sweeps.search import price, space
from launch.sweeps.search.config import SearchConfig
from launch.sweeps.search.price import Price
from pipeline.config import Problem, RecipeError, bound, refuse, section

PACKAGES = {"optuna": "5."}  # and the start of the version whose interface and files are known
INSTALL = "pip install 'hetstep[search]'"
MOST_PLANS = 4
"""Maximum number of corners that are planned. In a larger space, the lowest and the highest corner are."""


@dataclass(frozen=True)
class CheckedSearch:
    """Holds the results of the checks of a search that has no problems."""

    lowest: list[Prepared]  # the runs of the lowest corner, needed ones first
    price: Price | None  # None if the plan has no times
    max_steps: int | None  # of a trial; None if only its data bound it


def check(search: SearchConfig, overrides: list[str], run_dir: list[str]) -> CheckedSearch:
    """Check a search whose keys fit the schema. Raises RecipeError with all problems; writes nothing.

    overrides: the overrides of every trial. run_dir: `run_dir=FOLDER` with a folder that does not exist.
    """
    corners = space.corners(search)
    refuse([*package_problems(search), *_corners(search, overrides, corners)])
    lowest: list[Prepared] = []
    recipe_problems: list[Problem] = []
    try:
        lowest = prepare(search.recipe, [*overrides, *space.as_overrides(corners[0]), *run_dir])
    except RecipeError as error:
        recipe_problems += [_at_parameter(search, fault) for fault in error.problems]
    plans, problems = _plans(search, overrides, corners)
    priced = price.of(search, plans)
    reported = {(fault.key, fault.code) for fault in recipe_problems}
    refuse([*price.problems(search, priced), *recipe_problems, *(p for p in problems if (p.key, p.code) not in reported)])
    main = lowest[-1].recipe
    max_steps = bound(section(main).max_num_steps)
    refuse(_steps(search, max_steps))
    return CheckedSearch(lowest, priced, max_steps)


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


# ---- the recipe at the corners ------------------------------------------------------------------------------------------


def _corners(search: SearchConfig, overrides: list[str], corners: Sequence[space.Values]) -> Iterator[Problem]:
    """Yield the problems of the recipe itself, then the problems that only corners have, each once."""
    base = reading.inspect(search.recipe, overrides)
    reported = {(problem.key, problem.code) for problem in base.problems if problem.key not in search.parameters}
    yield from (problem.within("search.recipe") for problem in base.problems if problem.key not in search.parameters)
    for corner in corners:
        loaded = reading.inspect(search.recipe, [*overrides, *space.as_overrides(corner)])
        yield from (_of_corner(search, problem, corner) for problem in loaded.problems if _is_new(problem, reported))


def _is_new(problem: Problem, reported: set[tuple[str, str]]) -> bool:
    """Return whether a problem is not in `reported` yet, and add it."""
    is_new = (problem.key, problem.code) not in reported
    reported.add((problem.key, problem.code))
    return is_new


def _of_corner(search: SearchConfig, problem: Problem, corner: space.Values) -> Problem:
    """Return a problem of a corner as a problem of the parameter that causes it.

    If no parameter has the problem's key, the problem names the values of the corner.
    """
    at_parameter = _at_parameter(search, problem)
    return at_parameter if at_parameter != problem else problem.within(f"with {space.as_text(corner)}")


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


def _plans(
    search: SearchConfig, overrides: list[str], corners: Sequence[space.Values]
) -> tuple[list[Plan | None], list[Problem]]:
    """Return (the plans of up to MOST_PLANS corners, with None for a corner without one; the problems of these corners)."""
    chosen = corners if len(corners) <= MOST_PLANS else [corners[0], corners[-1]]
    plans: list[Plan | None] = []
    problems: dict[tuple[str, str], Problem] = {}
    for corner in chosen:
        try:
            examined = examine(search.recipe, [*overrides, *space.as_overrides(corner)], dry=True)
        except RecipeError as error:
            plans.append(None)
            problems |= {(problem.key, problem.code): _of_corner(search, problem, corner) for problem in error.problems}
            continue
        planned = examined.prepared[-1].plan if examined.prepared else None
        plans.append(planned if isinstance(planned, Plan) else None)
        for problem in examined.problems:
            problems.setdefault((problem.key, problem.code), _of_corner(search, problem, corner))
    return plans, [*problems.values()]


def _steps(search: SearchConfig, max_steps: int | None) -> Iterator[Problem]:
    """Yield a problem if the pruner cannot prune anything, because of the number of steps of a trial."""
    if search.pruner == "none":
        return
    if max_steps is not None and search.min_steps >= max_steps:
        message = (
            f"got {search.min_steps}; expected less than the {max_steps} steps of a trial, because otherwise no trial is pruned"
        )
        yield Problem("search.min_steps", "too-large", message)
    if max_steps is None and search.pruner == "hyperband":
        yield Problem(
            "search.pruner",
            "unsupported",
            "hyperband needs trials with a last step. Try search.pruner=asha, or set max_num_steps",
        )
