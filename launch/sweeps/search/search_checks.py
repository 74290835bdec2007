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
"""Most corners that are planned."""


@dataclass(frozen=True)
class CheckedSearch:
    """A search without problems."""

    lowest: list[Prepared]  # the runs of the lowest corner, needed ones first
    price: Price | None  # None if the plan has no times
    max_steps: int | None  # of a trial; None if only its data bound it


def check(search: SearchConfig, overrides: list[str], own: list[str]) -> CheckedSearch:
    """Check a search whose keys fit the schema. Raises RecipeError with all problems; writes nothing.

    overrides: of every trial. own: `key=value` of a run folder, which does not exist.
    """
    corners = space.corners(search)
    refuse([*installed(search), *_corners(search, overrides, corners)])
    lowest: list[Prepared] = []
    found: list[Problem] = []
    try:
        lowest = prepare(search.recipe, [*overrides, *space.as_overrides(corners[0]), *own])
    except RecipeError as error:
        found += [_at_parameter(search, each) for each in error.problems]
    plans, problems = _plans(search, overrides, corners)
    priced = price.of(search, plans)
    known = {(each.key, each.code) for each in found}
    refuse([*price.problems(search, priced), *found, *(each for each in problems if (each.key, each.code) not in known)])
    main = lowest[-1].recipe
    max_steps = bound(section(main).max_num_steps)
    refuse(_steps(search, max_steps))
    return CheckedSearch(lowest, priced, max_steps)


def installed(search: SearchConfig) -> Iterator[Problem]:
    """Yield a problem if Optuna is missing, or is of another version; likewise the package of CMA-ES."""
    wanted = {**PACKAGES, **({"cmaes": ""} if search.sampler == "cmaes" else {})}
    for package, version in wanted.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or not found.startswith(version):
            expected = f"{package} {version}*" if version else package
            yield Problem("search", "not-installed", f"got {found}; expected the package {expected}. Try {INSTALL}")


# ---- the recipe at the corners ------------------------------------------------------------------------------------------


def _corners(search: SearchConfig, overrides: list[str], corners: Sequence[space.Values]) -> Iterator[Problem]:
    """Yield the problems of the recipe itself, then those that only corners have, each once."""
    base = reading.inspect(search.recipe, overrides)
    known = {(each.key, each.code) for each in base.problems if each.key not in search.parameters}
    yield from (each.within("search.recipe") for each in base.problems if each.key not in search.parameters)
    for corner in corners:
        loaded = reading.inspect(search.recipe, [*overrides, *space.as_overrides(corner)])
        yield from (_of_corner(search, each, corner) for each in loaded.problems if _is_new(each, known))


def _is_new(problem: Problem, known: set[tuple[str, str]]) -> bool:
    """Return whether a problem is new, and add it to the known ones."""
    is_new = (problem.key, problem.code) not in known
    known.add((problem.key, problem.code))
    return is_new


def _of_corner(search: SearchConfig, problem: Problem, corner: space.Values) -> Problem:
    """Return a problem at its parameter; one of another key with the values of the corner."""
    own = _at_parameter(search, problem)
    return own if own != problem else problem.within(f"with {space.shown(corner)}")


def _at_parameter(search: SearchConfig, problem: Problem) -> Problem:
    """Return a problem of a parameter, or of a section above it that is no key, at its key in the suite; others unchanged."""
    is_section = problem.code == "unknown-key"
    for key in search.parameters:
        if key == problem.key or (is_section and key.startswith(f"{problem.key}.")):
            message = problem.message if key == problem.key else f"{problem.key} {problem.message}"
            return dataclasses.replace(problem, key=f"search.parameters.{key}", message=message, origin="")
    return problem


def _plans(
    search: SearchConfig, overrides: list[str], corners: Sequence[space.Values]
) -> tuple[list[Plan | None], list[Problem]]:
    """Return the plans of up to MOST_PLANS corners, None where there is none, and the problems of recipes and plans there."""
    chosen = corners if len(corners) <= MOST_PLANS else [corners[0], corners[-1]]
    plans: list[Plan | None] = []
    problems: dict[tuple[str, str], Problem] = {}
    for corner in chosen:
        try:
            found = examine(search.recipe, [*overrides, *space.as_overrides(corner)], dry=True)
        except RecipeError as error:
            plans.append(None)
            problems |= {(each.key, each.code): _of_corner(search, each, corner) for each in error.problems}
            continue
        planned = found.prepared[-1].plan if found.prepared else None
        plans.append(planned if isinstance(planned, Plan) else None)
        for each in found.problems:
            problems.setdefault((each.key, each.code), _of_corner(search, each, corner))
    return plans, [*problems.values()]


def _steps(search: SearchConfig, max_steps: int | None) -> Iterator[Problem]:
    """Yield the problems of a pruner that can prune nothing."""
    if search.pruner == "none":
        return
    if max_steps is not None and search.min_steps >= max_steps:
        why = f"got {search.min_steps}; expected below the {max_steps} steps of a trial, or nothing is pruned"
        yield Problem("search.min_steps", "too-large", why)
    if max_steps is None and search.pruner == "hyperband":
        yield Problem("search.pruner", "unsupported", "hyperband needs trials with a last step. Try asha, or max_num_steps")
