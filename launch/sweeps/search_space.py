"""Define the section `search` of a sweep, and the points and corners of its space."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from launch.sweeps.expressions import Expression, fault
from pipeline.config import recipe_class, schema_validation
from pipeline.recipe.values import MISSING, Bool, Check, Float, Int, NotNegative, Positive, Text

METRIC = re.compile(r"[A-Za-z_][\w./:-]*")
MOST_CORNERS = 64
"""Maximum number of corners of a space that are checked.

Of a larger space, these are checked: the lowest and the highest corner, and each end of each parameter with the others at their
lowest.
"""

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

    @property
    def count(self) -> int:
        """The number of values in a grid. A range needs a step."""
        if self.choices is not None:
            return len(self.choices)
        low, high, step = (Decimal(str(end)) for end in (self.low, self.high, self.step))
        return int((high - low) // step) + 1  # in binary, three steps of 0.1 exceed 0.3


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
        return math.prod(parameter.count for parameter in self.parameters.values()) if self.trials is None else self.trials


def is_whole(key: str, parameter: ParameterConfig) -> bool:
    """Return whether a range has whole numbers only, by the type of the key in the recipe's schema.

    Where the schema has no type, as for arguments of an optimizer, the range has whole numbers if its ends and its step are
    whole.
    """
    section, kind, names = recipe_class(None), None, key.split(".")
    while section and names:
        name, *names = names
        kind = schema_validation.fields(section).get(name)
        section, several = schema_validation.sections(section).get(name, (None, False))
        names = names[1:] if several else names
    kinds = set() if names else {kind, *get_args(kind)}
    if kinds & {int, float}:
        return int in kinds and float not in kinds
    return all(end is not None and float(end).is_integer() for end in (parameter.low, parameter.high, parameter.step))


def points(key: str, parameter: ParameterConfig, ends: bool = False) -> list[Any]:
    """Return the values of one parameter: its choices, or the points of a range in a grid. ends: only the range's two ends."""
    if parameter.choices is not None:
        return parameter.choices
    low, high, step = (Decimal(str(end)) for end in (parameter.low, parameter.high, parameter.step or 0))
    values = [low, high] if ends else [low + i * step for i in range(parameter.count)]
    whole = is_whole(key, parameter)
    return list(dict.fromkeys(int(value) if whole else float(value) for value in values))


def grid(search: SearchConfig, ends: bool = False) -> list[dict[str, Any]]:
    """Return every combination of the `points` of all parameters. The last parameter changes fastest."""
    by_key = {key: points(key, parameter, ends) for key, parameter in search.parameters.items()}
    return [dict(zip(by_key, values, strict=True)) for values in itertools.product(*by_key.values())]


def corners(search: SearchConfig) -> list[dict[str, Any]]:
    """Return the corners of the space, the lowest first and the highest last. A large space has only some of them here."""
    ends = {key: points(key, parameter, ends=True) for key, parameter in search.parameters.items()}
    if math.prod(map(len, ends.values())) <= MOST_CORNERS:
        return grid(search, ends=True)
    lowest, highest = ({key: values[i] for key, values in ends.items()} for i in (0, -1))
    return [lowest, *({**lowest, key: value} for key, values in ends.items() for value in values[1:]), highest]


def as_text(values: Values) -> str:
    """Return the values as a text such as `policy.optimizer.kwargs.lr=0.000123 ...`, with four significant digits."""
    return " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())
