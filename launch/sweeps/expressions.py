"""Parse and evaluate expressions over one run's metrics: `mean(train/reward, last=10) - at(val/reward, 0)`.

    expression  sums, differences, products, quotients and parentheses of numbers and statistics
    statistic   NAME(METRIC), NAME(METRIC, NUMBER), each with `last=K` (only the K last values), `from=STEP`, `to=STEP`
        first, last, min, max, mean, median
        at(METRIC, STEP)     the value at exactly that step
        quantile(METRIC, Q)  linear between neighbours, Q in [0, 1]
        area(METRIC)         the area under the curve by the trapezoidal rule, divided by the steps it spans: a mean height

A metric's name is as in metrics.jsonl and may contain slashes, so only statistics can be divided. Python parses the text and
never runs it. A missing metric, a missing step or a NaN in the window is an error, never a number.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

FIRST_ARGUMENT = re.compile(r"([A-Za-z_]\w*)\s*\(\s*([A-Za-z_][\w./:-]*)")  # a statistic and its metric
MAX_CHARACTERS = 500
"""Maximum length of an expression, far below the limits of Python's parser."""
WINDOW = ("last", "from", "to")
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Malformed(ValueError):
    """The text is not a valid expression."""


class NoValue(ValueError):
    """The expression has no value for this run."""


@dataclass(frozen=True)
class Curve:
    """Holds one metric of a run; a value is None where it was NaN or infinite."""

    steps: Sequence[int]  # ascending
    values: Sequence[float | None]


@dataclass(frozen=True)
class Statistic:
    """A statistic of one metric, such as `mean(train/reward, last=10)`."""

    name: str
    metric: str
    argument: float | None
    window: Mapping[str, float]


@dataclass(frozen=True)
class Operation:
    """An arithmetic operation on two expressions."""

    function: Callable[[float, float], float]
    left: Expression
    right: Expression


Expression = float | Statistic | Operation


def metrics(expression: Expression) -> Iterator[str]:
    """Yield the names of an expression's metrics, in order, with repetitions."""
    if isinstance(expression, Statistic):
        yield expression.metric
    elif isinstance(expression, Operation):
        yield from metrics(expression.left)
        yield from metrics(expression.right)


# ---- parsing ------------------------------------------------------------------------------------------------------------


def parse(text: str) -> Expression:
    """Parse an expression. Raises Malformed."""
    if len(text) > MAX_CHARACTERS:
        raise Malformed(f"got {len(text)} characters; expected at most {MAX_CHARACTERS}")
    quoted = re.sub(r"\bfrom\s*=", "from_=", FIRST_ARGUMENT.sub(r'\1("\2"', text.strip()))  # `from` is a keyword of Python
    try:
        return _read(ast.parse(quoted, mode="eval").body)
    except (SyntaxError, OverflowError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "numbers too large, or parentheses nested too deeply"
        raise Malformed(f"'{text}' is not an expression: {reason}") from None
    except ValueError as error:
        raise Malformed(f"'{text}' is not an expression: {error}") from None


def _read(node: ast.expr) -> Expression:
    """Convert a node of Python's syntax tree into an expression. Raises ValueError."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return Operation(operator.sub, 0.0, _read(inner))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
            return Operation(SIGNS[type(sign)], _read(left), _read(right))
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(metric)), *numbers], keywords=windows):
            return _statistic(
                name, metric, [*map(_number, numbers)], [(str(window.arg), _number(window.value)) for window in windows]
            )
        case ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"{name} needs the name of a metric: {name}(val/loss)")
    raise ValueError("expected a number or a statistic such as last(val/loss)")


def _statistic(name: str, metric: str, numbers: list[float], windows: list[tuple[str, float]]) -> Statistic:
    """Return a statistic after a check of its parts. Raises ValueError."""
    if name not in STATISTICS:
        near = difflib.get_close_matches(name, STATISTICS, 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"got '{name}'; expected a statistic: {', '.join(STATISTICS)}. {hint}".rstrip())
    if len(numbers) != (name in WITH_ARGUMENT):
        expected = (
            f"needs {WITH_ARGUMENT[name]}" if name in WITH_ARGUMENT else "takes no number; for a window use last=, from= or to="
        )
        raise ValueError(f"{name} {expected}: {name}({metric}{', ...' if name in WITH_ARGUMENT else ''})")
    if name == "quantile" and not 0 <= numbers[0] <= 1:
        raise ValueError(f"got {numbers[0]:g}; expected a quantile between 0 and 1")
    window: dict[str, float] = {}
    for key, value in windows:
        key = key.rstrip("_")
        if key not in WINDOW or key in window:
            raise ValueError(f"{key}= {'is given twice' if key in window else 'is not a window'}; expected last=, from= or to=")
        if name == "at":
            raise ValueError(f"at takes one step, so {key}= has no effect")
        if value != int(value) or (key == "last" and value < 1):
            raise ValueError(f"got {key}={value:g}; expected a whole number" + (", at least 1" if key == "last" else ""))
        window[key] = value
    return Statistic(name, metric, numbers[0] if numbers else None, window)


def _number(node: ast.expr) -> float:
    """Return the number that a node of Python's syntax tree stands for. Raises ValueError if it is not a number."""
    number = _read(node)
    if not isinstance(number, float):
        raise ValueError("expected a number after a metric's name")
    return number


# ---- evaluation ---------------------------------------------------------------------------------------------------------


def evaluate(expression: Expression, curves: Mapping[str, Curve]) -> float:
    """Return the value of an expression for one run. Raises NoValue."""
    if isinstance(expression, float | int):
        return expression
    if isinstance(expression, Statistic):
        return STATISTICS[expression.name](_points(expression, curves), expression.argument)
    try:
        return expression.function(evaluate(expression.left, curves), evaluate(expression.right, curves))
    except ZeroDivisionError:
        raise NoValue("division by 0") from None


Points = list[tuple[int, float]]


def _points(statistic: Statistic, curves: Mapping[str, Curve]) -> Points:
    """Return the (step, value) pairs in a statistic's window, at least one. Raises NoValue."""
    name = statistic.metric
    if name not in curves:
        near = difflib.get_close_matches(name, curves, 1)
        raise NoValue(f"metrics.jsonl has no {name}" + (f"; did you mean {near[0]}?" if near else ""))
    steps, window = curves[name].steps, statistic.window
    if statistic.name == "at":
        assert statistic.argument is not None, "`parse` requires a step"
        window = {"from": statistic.argument, "to": statistic.argument}
    points = [
        point
        for point in zip(steps, curves[name].values, strict=True)
        if window.get("from", point[0]) <= point[0] <= window.get("to", point[0])
    ]
    if not points:
        bounds = " ".join(f"{key} step {window[key]:g}" for key in ("from", "to") if key in window)
        raise NoValue(f"{name} has no value {bounds}; it has values from step {steps[0]} to {steps[-1]}")
    if (count := int(window.get("last", len(points)))) > len(points):
        raise NoValue(f"{name} has {len(points)} values; expected at least {count} for last={count}")
    points = points[len(points) - count :]
    finite = [(step, value) for step, value in points if value is not None]
    if unknown := [step for step, value in points if value is None]:
        raise NoValue(f"{name} is not a finite number at step {unknown[0]}")
    return finite


def _over(reduce: Callable[[list[float]], float]) -> Callable[[Points, float | None], float]:
    return lambda points, _: reduce([value for _, value in points])


def _quantile(points: Points, share: float | None) -> float:
    assert share is not None, "`parse` requires a number"
    ordered = sorted(value for _, value in points)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _area(points: Points, _: float | None) -> float:
    if len(points) == 1:
        return points[0][1]
    pairs = itertools.pairwise(points)
    return sum((b - a) * (left + right) / 2 for (a, left), (b, right) in pairs) / (points[-1][0] - points[0][0])


STATISTICS: dict[str, Callable[[Points, float | None], float]] = {
    "first": _over(operator.itemgetter(0)),
    "last": _over(operator.itemgetter(-1)),
    "min": _over(min),
    "max": _over(max),
    "mean": _over(statistics.fmean),
    "median": _over(statistics.median),
    "at": _over(operator.itemgetter(0)),
    "quantile": _quantile,
    "area": _area,
}
WITH_ARGUMENT = {"at": "a step", "quantile": "a number between 0 and 1"}
