"""Expressions over one run's metrics: `last(val/accuracy)`, `mean(train/reward, last=10) - at(val/reward, 0)`.

    expression  sums, differences, products, quotients and parentheses of numbers and statistics
    statistic   NAME(METRIC), NAME(METRIC, NUMBER), each with `last=K` (of the K last values only), `from=STEP`, `to=STEP`
        first, last, min, max, mean, median
        at(METRIC, STEP)     the value of that very step
        quantile(METRIC, Q)  linear between neighbours, Q in [0, 1]
        area(METRIC)         under the curve by the trapezoidal rule, over the steps that it spans: a mean height

A metric's name is as in metrics.jsonl, so a quotient of metrics is written as one of statistics. Nothing is ever evaluated as
Python. What has no value (no such metric, no such step, a NaN in the window) is an error that says so, never a number.
"""

from __future__ import annotations

import difflib
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")
NAME = re.compile(r"[A-Za-z_]\w*")
METRIC = re.compile(r"[A-Za-z_][\w./:-]*")
WINDOW = ("last", "from", "to")
DEPTH = 50
"""Of parentheses in each other; more than anybody means, and far from Python's limit."""


class Malformed(ValueError):
    """It is no expression: what is wrong, and where."""


class NoValue(ValueError):
    """The expression has no value for this run: why."""


@dataclass(frozen=True)
class Curve:
    """One metric of a run. None: it was NaN or infinite there."""

    steps: Sequence[int]  # ascending
    values: Sequence[float | None]


@dataclass(frozen=True)
class Number:
    value: float


@dataclass(frozen=True)
class Statistic:
    name: str
    metric: str
    argument: float | None = None
    window: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Operation:
    sign: str
    left: Expression
    right: Expression


Expression = Number | Statistic | Operation


def metrics(expression: Expression) -> Iterator[str]:
    """The names of the metrics in it, in order; one may come twice."""
    if isinstance(expression, Statistic):
        yield expression.metric
    elif isinstance(expression, Operation):
        yield from metrics(expression.left)
        yield from metrics(expression.right)


# ---- the value ------------------------------------------------------------------------------------------------------------


def evaluate(expression: Expression, curves: Mapping[str, Curve]) -> float:
    """Raises NoValue."""
    if isinstance(expression, Number):
        return expression.value
    if isinstance(expression, Statistic):
        return _statistic(expression, curves)
    left, right = evaluate(expression.left, curves), evaluate(expression.right, curves)
    match expression.sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if right == 0:
        raise NoValue("division by 0")
    return left / right


def _statistic(statistic: Statistic, curves: Mapping[str, Curve]) -> float:
    points = _points(statistic, curves)
    values = [value for _, value in points]
    if statistic.name == "at":
        return values[0]
    if statistic.name == "quantile":
        return _quantile(sorted(values), statistic.argument)
    if statistic.name == "area":
        return _area(points)
    return REDUCTIONS[statistic.name](values)


def _points(statistic: Statistic, curves: Mapping[str, Curve]) -> list[tuple[int, float]]:
    """What the statistic is of: (step, value), one at least. Raises NoValue."""
    name = statistic.metric
    if name not in curves:
        near = difflib.get_close_matches(name, curves, 1)
        raise NoValue(f"there is no {name} in metrics.jsonl" + (f"; the nearest is {near[0]}" if near else ""))
    points = list(zip(curves[name].steps, curves[name].values, strict=True))
    window = dict(statistic.window)
    if statistic.name == "at":
        window = {"from": statistic.argument, "to": statistic.argument}
    points = [point for point in points if window.get("from", point[0]) <= point[0] <= window.get("to", point[0])]
    if not points:
        steps = curves[name].steps
        raise NoValue(f"{name} has no value {_where(window)}; it has from step {steps[0]} to {steps[-1]}")
    if (count := int(window.get("last", len(points)))) > len(points):
        raise NoValue(f"{name} has {len(points)} values, and the last {count} are asked for")
    points = points[len(points) - count :]
    if lost := [step for step, value in points if value is None]:
        raise NoValue(f"{name} is not a finite number at step {lost[0]}")
    return points


def _where(window: Mapping[str, float]) -> str:
    if window.get("from") == window.get("to"):
        return f"at step {window['from']:g}"
    return " ".join(f"{key} step {window[key]:g}" for key in ("from", "to") if key in window)


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _area(points: list[tuple[int, float]]) -> float:
    if len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    return sum((b - a) * (left + right) / 2 for (a, left), (b, right) in pairs) / (points[-1][0] - points[0][0])


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
}
STATISTICS = (*REDUCTIONS, "at", "quantile", "area")
WITH_ARGUMENT = {"at": "a step", "quantile": "a number between 0 and 1"}


# ---- reading it -------------------------------------------------------------------------------------------------------------


def parse(text: str) -> Expression:
    """Raises Malformed."""
    return _Parser(text).whole()


class _Parser:
    """By recursive descent: sum -> product -> factor -> statistic."""

    def __init__(self, text: str):
        self.text, self.place, self.depth = text, 0, 0

    def whole(self) -> Expression:
        found = self._sum()
        if self._rest():
            self._fail("what follows is no part of an expression")
        return found

    def _sum(self) -> Expression:
        return self._chain("+-", self._product)

    def _product(self) -> Expression:
        return self._chain("*/", self._factor)

    def _chain(self, signs: str, part: Callable[[], Expression]) -> Expression:
        left = part()
        while sign := self._take_any(signs):
            left = Operation(sign, left, part())
        return left

    def _factor(self) -> Expression:
        self.depth += 1
        if self.depth > DEPTH:
            self._fail("too many parentheses in each other")
        try:
            if self._take_any("-"):
                return Operation("-", Number(0.0), self._factor())
            if self._take_any("("):
                inner = self._sum()
                self._insist(")")
                return inner
            if (number := self._match(NUMBER)) is not None:
                return Number(float(number))
            return self._statistic()
        finally:
            self.depth -= 1

    def _statistic(self) -> Statistic:
        name = self._match(NAME)
        if name is None:
            self._fail("a number or a statistic such as last(val/loss) is wanted")
        if name not in STATISTICS:
            near = difflib.get_close_matches(name, STATISTICS, 1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            self._fail(f"'{name}' is no statistic; {hint}there are: {', '.join(STATISTICS)}", back=len(name))
        self._insist("(")
        metric = self._match(METRIC)
        if metric is None:
            self._fail("the name of a metric is wanted, such as val/loss")
        argument, window = self._options(name)
        if name in WITH_ARGUMENT and argument is None:
            self._fail(f"{name} needs {WITH_ARGUMENT[name]}: {name}({metric}, ...)")
        if name == "quantile" and not 0 <= argument <= 1:
            self._fail(f"{argument:g} is not between 0 and 1")
        if name == "at" and window:
            self._fail(f"at is of one step, so {window[0][0]}= means nothing")
        return Statistic(name, metric, argument, tuple(window))

    def _options(self, name: str) -> tuple[float | None, list[tuple[str, float]]]:
        """(the plain number, the window) up to the closing parenthesis."""
        argument, window = None, []
        while not self._take_any(")"):
            if not self._take_any(","):
                self._fail("a comma or a closing parenthesis is wanted")
            if (key := self._match(NAME)) is None:
                if name not in WITH_ARGUMENT or argument is not None:
                    self._fail(
                        f"{name} takes no {'second ' if argument is not None else ''}number; a window is last=, from=, to="
                    )
                argument = self._number()
                continue
            if key not in WINDOW or key in dict(window):
                twice = "is given twice" if key in WINDOW else "is no window"
                self._fail(f"{key}= {twice}; there are last=, from=, to=", back=len(key))
            self._insist("=")
            value = self._number()
            if value != int(value) or (key == "last" and value < 1):
                self._fail(f"{key}= is a whole number" + (" from 1 on" if key == "last" else ""))
            window.append((key, value))
        return argument, window

    # ---- characters ---------------------------------------------------------------------------------------------------------

    def _rest(self) -> str:
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1
        return self.text[self.place :]

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._rest())
        if found is None:
            return None
        self.place += found.end()
        return found.group()

    def _take_any(self, characters: str) -> str | None:
        rest = self._rest()
        if not rest or rest[0] not in characters:
            return None
        self.place += 1
        return rest[0]

    def _insist(self, character: str) -> None:
        if not self._take_any(character):
            self._fail(f"'{character}' is wanted")

    def _number(self) -> float:
        number = self._match(NUMBER)
        if number is None:
            self._fail("a number is wanted")
        return float(number)

    def _fail(self, what: str, back: int = 0) -> None:
        place = self.place - back
        where = f"at '{self.text[place:].strip()[:30]}'" if self.text[place:].strip() else "at the end"
        raise Malformed(f"'{self.text}' is no expression: {where}: {what}")
