"""Compute the values of parameters and their overrides of a recipe: kinds, corners of the space, points of a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, get_args

from launch.sweeps.search.config import ParameterConfig, SearchConfig
from pipeline.config import Recipe, schema_validation, yaml_text

MOST_CORNERS = 64
"""Maximum number of corners of a space that are checked.

Of a larger space, these are checked: the lowest and the highest corner, and each end of each parameter with the others at their
lowest.
"""

Values = Mapping[str, Any]
"""Dotted key of the recipe -> value."""


def is_whole(key: str, parameter: ParameterConfig) -> bool:
    """Return whether a range has whole numbers only, by the type of the key in the recipe's schema.

    Where the schema has no type, as for arguments of an optimizer, the range has whole numbers if its ends and its step are
    whole.
    """
    section, names = Recipe, key.split(".")
    while names:
        name = names.pop(0)
        inner, several = schema_validation.sections(section).get(name, (None, False))
        if inner is None or not names:
            kind = schema_validation.fields(section).get(name) if not names else None
            kinds = {kind, *get_args(kind)}
            if kinds & {int, float}:
                return int in kinds and float not in kinds
            break
        names = names[1:] if several else names
        section = inner
    ends = (parameter.low, parameter.high, parameter.step)
    return all(end is not None and float(end).is_integer() for end in ends)


def number(value: float, integer: bool) -> float:
    """Return a number of a range, as an int if the range has whole numbers only and the number is whole."""
    return int(value) if integer and float(value).is_integer() else float(value)


def ends(key: str, parameter: ParameterConfig) -> list[Any]:
    """Return both ends of a range, or all choices."""
    if parameter.choices is not None:
        return parameter.choices
    integer = is_whole(key, parameter)
    assert parameter.low is not None and parameter.high is not None, "`checks.structure` requires them"
    return list(dict.fromkeys([number(parameter.low, integer), number(parameter.high, integer)]))


def corners(search: SearchConfig) -> list[dict[str, Any]]:
    """Return the corners of the space, the lowest first and the highest last.

    A space with more than MOST_CORNERS corners has only some of them here.
    """
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
    integer = is_whole(key, parameter)
    return [number(float(low + i * step), integer) for i in range(count(parameter))]


def count(parameter: ParameterConfig) -> int:
    """Return the number of values of one parameter in a grid. A range needs a step."""
    if parameter.choices is not None:
        return len(parameter.choices)
    low, high, step = _decimals(parameter)
    return int((high - low) // step) + 1


def _decimals(parameter: ParameterConfig) -> tuple[Decimal, Decimal, Decimal]:
    """Return (low, high, step) of a range as decimal numbers.

    In binary, three steps of 0.1 exceed an upper end of 0.3.
    """
    low, high, step = (None if end is None else Decimal(str(end)) for end in (parameter.low, parameter.high, parameter.step))
    assert low is not None and high is not None and step is not None, "`structure` requires them"
    return low, high, step


def grid(search: SearchConfig) -> list[dict[str, Any]]:
    """Return every combination of the points of all parameters. The last parameter changes fastest."""
    points_by_key = {key: points(key, parameter) for key, parameter in search.parameters.items()}
    return [dict(zip(points_by_key, values, strict=True)) for values in itertools.product(*points_by_key.values())]


def trials(search: SearchConfig) -> int:
    """Return the number of trials of a search; without the key `trials`, the number of points of its grid."""
    return len(grid(search)) if search.trials is None else search.trials


def as_overrides(values: Values) -> list[str]:
    """Return values as `key=value` arguments."""
    return [f"{key}={yaml_text.dump([value], on_one_line=True).strip()[1:-1]}" for key, value in values.items()]


def as_text(values: Values) -> str:
    """Return the values as a text such as `policy.optimizer.kwargs.lr=0.000123 ...`, with four significant digits."""
    return " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items())
