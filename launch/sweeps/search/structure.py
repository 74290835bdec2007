"""Check the section `search` by itself: ranges, choices, the metric, and keys that exclude each other."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any

from launch.runs.run_setup import flat
from launch.sweeps import expressions
from launch.sweeps.search import objective, space
from launch.sweeps.search.config import ParameterConfig, SearchConfig
from pipeline.config import Problem

MOST_POINTS = 10_000
"""Maximum number of points of a grid."""
READ = ("name", "overrides", "folder", "search", "retries")
"""Keys of a suite that a search reads."""
DEFAULT = SearchConfig()


def problems(
    search: SearchConfig, suite: Mapping[str, Any], default: Mapping[str, Any], set_by_sweep: Container[str]
) -> Iterator[Problem]:
    """Yield the problems of the section `search` of a suite that fits the schema.

    suite, default: the values of the whole suite, and a suite's default values. set_by_sweep: keys of a recipe that no trial
    may set.
    """
    for key, value in suite.items():
        if key not in READ and value != default[key]:
            yield Problem(key, "contradiction", f"a suite with search does not read this key. Try a suite without {key}")
    for key, overrides in (("overrides", suite["overrides"]), ("search.overrides", search.overrides)):
        for name in flat(overrides) if overrides else ():
            if name in set_by_sweep:
                yield Problem(f"{key}.{name}", "contradiction", "the sweep sets this for each trial")
            elif name in search.parameters:
                yield Problem(f"{key}.{name}", "has-no-effect", "search.parameters sets this key for every trial")
    if not search.parameters:
        example = "such as policy.optimizer.kwargs.lr: {low: 1.0e-6, high: 1.0e-4, log: true}"
        yield Problem("search.parameters", "missing-value", f"got none; expected at least one, {example}")
    wrong = False
    for key, parameter in search.parameters.items():
        path = f"search.parameters.{key}"
        if key in set_by_sweep:
            yield Problem(path, "contradiction", "the sweep sets this for each trial")
        for inner in search.parameters:
            if inner.startswith(f"{key}."):
                yield Problem(path, "contradiction", f"got {inner} too, which is part of this key; expected one of them")
        faults = list(_choices(path, parameter) if parameter.choices is not None else _range(path, key, parameter))
        wrong = wrong or bool(faults)
        yield from faults
    yield from _metric(search.metric)
    yield from _pruner(search)
    if search.parameters and not wrong:
        yield from _sampler(search)


def _choices(path: str, parameter: ParameterConfig) -> Iterator[Problem]:
    choices: list[Any] = parameter.choices or []
    if not choices:
        yield Problem(f"{path}.choices", "missing-value", "got none; expected at least one")
    for choice in choices:
        if not isinstance(choice, str | int | float | None) or (isinstance(choice, float) and not math.isfinite(choice)):
            yield Problem(f"{path}.choices", "wrong-type", f"got {choice}; expected texts, numbers, true, false or null")
            return
    if doubles := [item for i, item in enumerate(choices) if item in choices[:i]]:
        yield Problem(f"{path}.choices", "given-twice", f"got {doubles[0]} twice; expected distinct choices")
    for name in ("low", "high", "step"):
        if getattr(parameter, name) is not None:
            yield Problem(f"{path}.{name}", "contradiction", "got choices too; expected a range or choices")
    if parameter.log:
        yield Problem(
            f"{path}.log", "has-no-effect", "only a range is drawn on a logarithmic scale; this parameter has choices"
        )


def _range(path: str, key: str, parameter: ParameterConfig) -> Iterator[Problem]:
    low, high, step = parameter.low, parameter.high, parameter.step
    if low is None or high is None:
        lacking = "low" if low is None else "high"
        yield Problem(f"{path}.{lacking}", "missing-value", "got none; expected both ends of the range, or a list of choices")
        return
    if low >= high:
        yield Problem(f"{path}.low", "contradiction", f"got {low:g}; expected below high, {high:g}")
        return
    if parameter.log and low <= 0:
        yield Problem(f"{path}.low", "too-small", f"got {low:g}; expected above 0, since log is true")
    if parameter.log and step is not None:
        yield Problem(f"{path}.step", "contradiction", f"got {step:g}; expected null, as log is true. Try a list of choices")
    if step is not None and space.count(parameter) < 2:
        yield Problem(f"{path}.step", "too-large", f"got {step:g}; expected at most {high - low:g}, the width of the range")
    if space.is_whole(key, parameter):
        for name, value in {"low": low, "high": high, "step": step}.items():
            if value is not None and not float(value).is_integer():
                yield Problem(f"{path}.{name}", "wrong-type", f"got {value:g}; expected a whole number, as {key} takes")


def _metric(metric: str) -> Iterator[Problem]:
    try:
        if not any(expressions.metrics(objective.parse(metric))):
            message = f"got '{metric}', a constant; expected a metric such as val/accuracy, or an expression over metrics"
            yield Problem("search.metric", "bad-format", message)
    except expressions.Malformed as error:
        yield Problem("search.metric", "bad-format", str(error))


def _sampler(search: SearchConfig) -> Iterator[Problem]:
    """Yield the problems of a sampler with parameters that are each valid."""
    if search.sampler == "grid":
        yield from _grid(search)
    elif search.trials is None:
        yield Problem(
            "search.trials",
            "missing-value",
            f"got none; expected the number of trials, because the sampler is {search.sampler}",
        )
    if search.sampler == "cmaes":
        for key, parameter in search.parameters.items():
            if parameter.choices is not None:
                yield Problem(f"search.parameters.{key}", "unsupported", "cmaes draws from ranges only. Try sampler=tpe")
        if len(search.parameters) < 2:
            yield Problem("search.sampler", "unsupported", "cmaes needs at least two parameters. Try tpe")


def _grid(search: SearchConfig) -> Iterator[Problem]:
    without = [key for key, item in search.parameters.items() if item.choices is None and item.step is None]
    for key in without:
        message = "got none; expected the step between points of the grid, or a list of choices in place of the range"
        yield Problem(f"search.parameters.{key}.step", "missing-value", message)
    if without:
        return
    size = math.prod(space.count(parameter) for parameter in search.parameters.values())
    if size > MOST_POINTS:
        yield Problem("search.sampler", "too-large", f"got a grid of {size:,} points; expected at most {MOST_POINTS:,}")
    elif search.trials not in (None, size):
        yield Problem(
            "search.trials", "contradiction", f"got {search.trials}; expected null or {size}, the number of points of the grid"
        )


def _pruner(search: SearchConfig) -> Iterator[Problem]:
    """Yield a problem for each key that differs from its default and that the pruner does not read."""
    read = {"none": (), "median": ("min_steps",)}.get(search.pruner, ("min_steps", "reduction_factor"))
    for name in ("min_steps", "reduction_factor"):
        if name not in read and getattr(search, name) != getattr(DEFAULT, name):
            yield Problem(f"search.{name}", "has-no-effect", f"pruner={search.pruner} does not read it")
