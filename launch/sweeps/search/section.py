"""The section `search` of a suite: its keys, its own checks, and the values of its parameters as overrides of a recipe.

search:
  recipe: tiny_grpo
  parameters:
    policy.optimizer.kwargs.lr: {low: 1.0e-5, high: 1.0e-2, log: true}
    loss_fn.reference_policy_kl_penalty: [0, 0.01, 0.1]
  metric: val/accuracy
  direction: maximize
  trials: 24
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from launch.runs.run_setup import flat
from launch.sweeps.expressions import Expression, fault
from pipeline.config import Problem, Recipe, schema_validation, yaml_text
from pipeline.recipe.values import MISSING, Bool, Check, Float, Int, NotNegative, Positive, Text

MOST_CORNERS = 64
"""Maximum number of corners of a space that are checked.

Of a larger space, these are checked: the lowest and the highest corner, and each end of each parameter with the others at their
lowest.
"""
MOST_POINTS = 10_000
"""Maximum number of points of a grid."""
METRIC = re.compile(r"[A-Za-z_][\w./:-]*")

Values = Mapping[str, Any]
"""Dotted key of the recipe -> value."""


@dataclass
class ParameterConfig:
    """The values of one key: a range of numbers, or choices. A list stands for `{choices: [...]}`."""

    low: Float | None = None  # ends of a range, both included
    high: Float | None = None
    log: Bool = False  # draw from the range on a logarithmic scale
    step: Annotated[Float | None, Field(gt=0)] = None  # between values, from `low` on; null: any value
    choices: list[Any] | None = None  # texts, numbers, true, false or null, in place of a range


def _formula(metric: str) -> str:
    """Return a metric as the text of an expression; a metric's name alone stands for its last value."""
    return f"last({metric})" if METRIC.fullmatch(metric.strip()) else metric


def _spell_out(value: Any) -> Any:
    return {"choices": value} if isinstance(value, list) else value


@dataclass
class SearchConfig:
    """A search of hyperparameters by Optuna. Each trial is a run of one recipe with values of its own."""

    recipe: Text = MISSING  # of every trial: a name in recipes/, or a path
    overrides: dict[str, Any] = field(default_factory=dict)  # of every trial; they override the suite's
    parameters: dict[str, Annotated[ParameterConfig, BeforeValidator(_spell_out)]] = field(default_factory=dict)
    metric: Annotated[Text, Check(lambda text: fault(_formula(text)))] = MISSING  # a metric, or an expression; see `expression`
    direction: Literal["maximize", "minimize"] = MISSING  # pyright: ignore[reportAssignmentType] as for texts
    trials: Positive | None = None  # null: only with sampler=grid, the number of its points
    sampler: Literal["random", "tpe", "grid", "cmaes"] = "tpe"  # tpe: a tree-structured Parzen estimator
    # asha stops trials that are not among the best 1 / reduction_factor at step min_steps * reduction_factor^k; hyperband does
    # in several brackets; median stops trials worse than the median.
    pruner: Literal["none", "asha", "hyperband", "median"] = "none"
    min_steps: Positive = 1  # no trial is pruned before this step
    reduction_factor: Annotated[Int, Field(ge=2)] = 3
    parallel: Positive = 1  # trials at once
    seed: NotNegative = 0  # of the sampler; the recipe's own seed is the same in all trials
    budget_gpu_hours: Annotated[Float | None, Field(gt=0)] = None  # maximum of the plan's GPU-hours, as if no trial were pruned

    @property
    def expression(self) -> Expression:
        """The metric as an expression, which pruning evaluates at every step."""
        return Expression(_formula(self.metric))

    @property
    def number_of_trials(self) -> int:
        """The number of trials; without the key `trials`, the number of points of the grid."""
        return len(grid(self)) if self.trials is None else self.trials


# ---- the space ----------------------------------------------------------------------------------------------------------


def is_whole(key: str, parameter: ParameterConfig) -> bool:
    """Return whether a range has whole numbers only, by the type of the key in the recipe's schema.

    Where the schema has no type, as for arguments of an optimizer, the range has whole numbers if its ends and its step are
    whole.
    """
    section, kind, names = Recipe, None, key.split(".")
    while section and names:
        name, *names = names
        kind = schema_validation.fields(section).get(name)
        section, several = schema_validation.sections(section).get(name, (None, False))
        names = names[1:] if several else names
    kinds = set() if names else {kind, *get_args(kind)}
    if kinds & {int, float}:
        return int in kinds and float not in kinds
    return all(end is not None and float(end).is_integer() for end in (parameter.low, parameter.high, parameter.step))


def ends(key: str, parameter: ParameterConfig) -> list[Any]:
    """Return both ends of a range, or all choices."""
    if parameter.choices is not None:
        return parameter.choices
    assert parameter.low is not None and parameter.high is not None, "`problems` requires them"
    return list(dict.fromkeys(_numbers(key, parameter, [parameter.low, parameter.high])))


def _numbers(key: str, parameter: ParameterConfig, values: list[float]) -> list[float]:
    """Return numbers of a range, as integers if the range has whole numbers only."""
    whole = is_whole(key, parameter)
    return [int(value) if whole and float(value).is_integer() else float(value) for value in values]


def corners(search: SearchConfig) -> list[dict[str, Any]]:
    """Return the corners of the space, the lowest first and the highest last. A large space has only some of them here."""
    ends_by_key = {key: ends(key, parameter) for key, parameter in search.parameters.items()}
    if math.prod(map(len, ends_by_key.values())) <= MOST_CORNERS:
        return [dict(zip(ends_by_key, values, strict=True)) for values in itertools.product(*ends_by_key.values())]
    lowest, highest = ({key: values[i] for key, values in ends_by_key.items()} for i in (0, -1))
    return [lowest, *({**lowest, key: value} for key, values in ends_by_key.items() for value in values[1:]), highest]


def points(key: str, parameter: ParameterConfig) -> list[Any]:
    """Return the values of one parameter in a grid: its choices, or a range from its low end. The range needs a step."""
    if parameter.choices is not None:
        return parameter.choices
    low, _, step = _decimals(parameter)
    return _numbers(key, parameter, [float(low + i * step) for i in range(count(parameter))])


def count(parameter: ParameterConfig) -> int:
    """Return the number of values of one parameter in a grid. A range needs a step."""
    if parameter.choices is not None:
        return len(parameter.choices)
    low, high, step = _decimals(parameter)
    return int((high - low) // step) + 1


def _decimals(parameter: ParameterConfig) -> tuple[Decimal, Decimal, Decimal]:
    """Return (low, high, step) of a range as decimal numbers, because in binary three steps of 0.1 exceed 0.3."""
    low, high, step = (Decimal(str(end)) for end in (parameter.low, parameter.high, parameter.step))
    return low, high, step


def grid(search: SearchConfig) -> list[dict[str, Any]]:
    """Return every combination of the points of all parameters. The last parameter changes fastest."""
    points_by_key = {key: points(key, parameter) for key, parameter in search.parameters.items()}
    return [dict(zip(points_by_key, values, strict=True)) for values in itertools.product(*points_by_key.values())]


def as_arguments(values: Values) -> list[str]:
    """Return values of a recipe's keys, which may be nested, as `key=value` arguments."""
    pairs = flat(dict(values)) if values else {}
    return [f"{key}={yaml_text.dump([value], on_one_line=True).strip()[1:-1]}" for key, value in pairs.items()]


def as_text(values: Values) -> str:
    """Return the values as a text such as `policy.optimizer.kwargs.lr=0.000123 ...`, with four significant digits."""
    return " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())


# ---- checks of the section by itself ------------------------------------------------------------------------------------


def problems(search: SearchConfig) -> Iterator[Problem]:
    """Yield the problems of a section that fits the schema: ranges, choices, the metric, keys that exclude each other."""
    if not search.parameters:
        example = "such as policy.optimizer.kwargs.lr: {low: 1.0e-6, high: 1.0e-4, log: true}"
        yield Problem("search.parameters", "missing-value", f"got none; expected at least one, {example}")
    wrong = False
    for key, parameter in search.parameters.items():
        path = f"search.parameters.{key}"
        for inner in search.parameters:
            if inner.startswith(f"{key}."):
                yield Problem(path, "contradiction", f"got {inner} too, which is part of this key; expected one of them")
        faults = list(_choices(path, parameter) if parameter.choices is not None else _range(path, key, parameter))
        wrong = wrong or bool(faults)
        yield from faults
    reads = {"none": (), "median": ("min_steps",)}.get(search.pruner, ("min_steps", "reduction_factor"))
    for name in ("min_steps", "reduction_factor"):
        if name not in reads and getattr(search, name) != getattr(SearchConfig, name):
            yield Problem(f"search.{name}", "has-no-effect", f"pruner={search.pruner} does not read it")
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
        message = "only a range is drawn on a logarithmic scale; this parameter has choices"
        yield Problem(f"{path}.log", "has-no-effect", message)


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
    if step is not None and count(parameter) < 2:
        yield Problem(f"{path}.step", "too-large", f"got {step:g}; expected at most {high - low:g}, the width of the range")
    if is_whole(key, parameter):
        for name, value in {"low": low, "high": high, "step": step}.items():
            if value is not None and not float(value).is_integer():
                yield Problem(f"{path}.{name}", "wrong-type", f"got {value:g}; expected a whole number, as {key} takes")


def _sampler(search: SearchConfig) -> Iterator[Problem]:
    """Yield the problems of a sampler with parameters that are each valid."""
    if search.sampler == "grid":
        yield from _grid(search)
    elif search.trials is None:
        message = f"got none; expected the number of trials, because the sampler is {search.sampler}"
        yield Problem("search.trials", "missing-value", message)
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
    size = 0 if without else math.prod(map(count, search.parameters.values()))
    if size > MOST_POINTS:
        yield Problem("search.sampler", "too-large", f"got a grid of {size:,} points; expected at most {MOST_POINTS:,}")
    elif size and search.trials not in (None, size):
        message = f"got {search.trials}; expected null or {size}, the number of points of the grid"
        yield Problem("search.trials", "contradiction", message)
