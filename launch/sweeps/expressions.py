"""Read one run's metrics, and evaluate expressions over them: `mean(train/reward, last=10) - at(val/reward, 0)`.

    expression  sums, differences, products, quotients and parentheses of numbers and statistics
    statistic   NAME(METRIC), NAME(METRIC, NUMBER), each with `last=K` (only the K last values), `from=STEP`, `to=STEP`
        first, last, min, max, mean, median
        at(METRIC, STEP)     the value at exactly that step
        quantile(METRIC, Q)  linear between neighbours, Q in [0, 1]
        area(METRIC)         the area under the curve by the trapezoidal rule, divided by the steps it spans: a mean height

A metric's name is as in metrics.jsonl and may contain slashes, so only statistics can be divided. Python parses the text and
never runs it: whatever is not listed here is refused. A missing metric, a missing step or a NaN in the window is an error,
never a number.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.runs import run_files
from launch.runs.attempts import all_attempts
from pipeline.observe import metrics

FIRST_ARGUMENT = re.compile(r"([A-Za-z_]\w*)\s*\(\s*([A-Za-z_][\w./:-]*)")  # a statistic and its metric
MAX_CHARACTERS = 500
"""Maximum length of an expression, far below the limits of Python's parser."""
WINDOW = {"last", "from", "to"}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class NoValue(ValueError):
    """The expression has no value for this run, or the gate nothing to compare it with. The message says why."""


@dataclass(frozen=True)
class Curve:
    """Holds one metric of a run; a value is None where it was NaN or infinite."""

    steps: Sequence[int]  # ascending
    values: Sequence[float | None]


# ---- a run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunMeasurements:
    """Holds the metrics and the hardware of one run with one seed."""

    curves: Mapping[str, Curve]
    hardware: str | None  # such as "2 x (8 x NVIDIA H100 80GB HBM3)"; None if not recorded
    seconds: float = 0.0  # from the start of its first attempt to its last step
    folder: Path | None = None  # the run's


def measure(run_dir: Path) -> RunMeasurements:
    """Return the metrics and the hardware of a run. Raises RecipeError for a malformed metrics.jsonl."""
    lines, attempts = metrics.read(run_dir / "metrics.jsonl"), all_attempts(run_dir)
    seconds = max(0.0, lines[-1]["time"] - attempts[0].started) if lines and attempts else 0.0
    nodes = next((nodes for attempt in reversed(attempts) if (nodes := run_files.nodes(attempt.folder))), {})
    return RunMeasurements(curves(lines), by_kind(nodes.values()), seconds, run_dir)


def curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return metric -> its curve, over the steps that have the metric. lines: the records of metrics.jsonl."""
    points: dict[str, dict[int, float | None]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time"):
                points.setdefault(name, {})[line["step"]] = value
    return {name: Curve([*values], [*values.values()]) for name, values in points.items()}


def by_kind(nodes: Iterable[Any]) -> str | None:
    """Return a text that counts the nodes of a nodes.json by kind; None if a node lists neither GPUs nor its processor."""
    kinds: Counter[str] = Counter()
    for node in nodes:
        gpus = Counter(gpu["name"] for gpu in node.get("gpus", ()))
        kind = ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or node.get("cpu")
        if kind is None:
            return None
        kinds[kind] += 1
    return "; ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in sorted(kinds.items())) or None


def by_step(seeds: Iterable[Curve]) -> dict[int, list[float]]:
    """Return step -> the values of the seeds, steps ascending. A seed without a value at a step is left out there."""
    values_by_step: dict[int, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve.steps, curve.values, strict=True):
            if value is not None:
                values_by_step.setdefault(step, []).append(value)
    return dict(sorted(values_by_step.items()))


# ---- expressions --------------------------------------------------------------------------------------------------------


class Expression:
    """A number that can be computed from each run's metrics."""

    def __init__(self, text: str):
        """Parse the text. Raises ValueError."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"got {len(text)} characters; expected at most {MAX_CHARACTERS}")
        quoted = re.sub(r"\bfrom\s*=", "from_=", FIRST_ARGUMENT.sub(r'\1("\2"', text.strip()))  # `from` is a keyword of Python
        self.metrics: list[str] = []
        """The names of the metrics, in the order of the text, each once."""
        try:
            if mark := re.search("['\"#]", text):  # of a text or a comment of Python
                raise ValueError(f"got {mark[0]}; expected the name of a metric without quotes")
            tree = ast.parse(quoted, mode="eval").body
            self._value = self._compile(tree)
        except (SyntaxError, OverflowError, RecursionError, MemoryError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            if not isinstance(error, SyntaxError | ValueError):
                reason = "numbers too large, or parentheses nested too deeply"
            raise ValueError(f"'{text}' is not an expression: {reason}") from None
        self.is_statistic = isinstance(tree, ast.Call)
        """True for a single statistic, whose value is a height in the metric's curve."""

    def value(self, curves: Mapping[str, Curve]) -> float:
        """Return the value for a run with these metrics. Raises NoValue."""
        try:
            return self._value(curves)
        except ZeroDivisionError:
            raise NoValue("division by 0") from None

    def _compile(self, node: ast.expr) -> Callable[[Mapping[str, Curve]], float]:
        """Return the function of a run's curves that a node of Python's syntax tree stands for. Raises ValueError.

        The nodes below are all that an expression may contain.
        """
        match node:
            case ast.Constant():
                number = _number(node)
                return lambda curves: number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._compile(operand)
                return lambda curves: 0.0 - inner(curves)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
                first, second, apply = self._compile(left), self._compile(right), SIGNS[type(sign)]
                return lambda curves: apply(first(curves), second(curves))
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(metric)), *arguments], keywords=keywords):
                numbers = [_number(argument) for argument in arguments]
                keys = [str(keyword.arg).rstrip("_") for keyword in keywords]
                window = dict(zip(keys, [_number(keyword.value) for keyword in keywords], strict=True))
                _check_statistic(name, numbers, window, len(keys))
                self.metrics += [metric] if metric not in self.metrics else []
                if name == "at":
                    window, numbers = {"from": numbers[0], "to": numbers[0]}, []
                return lambda curves: STATISTICS[name](*_points(metric, window, curves), *numbers)
            case ast.Call(func=ast.Name(id=name)):
                raise ValueError(f"{name} needs the name of a metric: {name}(val/loss)")
        raise ValueError("expected a number or a statistic such as last(val/loss)")


def fault(text: str) -> str | None:
    """Return why a text is no expression over metrics; None if it is one."""
    try:
        has_metrics = bool(Expression(text).metrics)
    except ValueError as error:
        return str(error)
    return None if has_metrics else f"got '{text}', which is a constant; expected an expression over metrics"


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    raise ValueError("expected a number or a statistic such as last(val/loss), and only numbers after a metric's name")


def _check_statistic(name: str, numbers: list[float], window: Mapping[str, float], keys: int) -> None:
    """Raise ValueError for a statistic that does not exist, or with other arguments. keys: their number, with repetitions."""
    if name not in STATISTICS:
        near = difflib.get_close_matches(name, STATISTICS, 1)
        hint = f". did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"got '{name}'; expected a statistic: {', '.join(STATISTICS)}{hint}")
    fits = len(numbers) == (name in ARGUMENTS) and len(window) == keys and (name != "quantile" or 0 <= numbers[0] <= 1)
    allowed = set() if name == "at" else WINDOW
    whole = all(value == int(value) for value in window.values()) and window.get("last", 1) >= 1
    if not (fits and whole and window.keys() <= allowed):
        windows = f", with {' or '.join(f'{key}=' for key in sorted(allowed))} a whole number" if allowed else ""
        raise ValueError(f"expected {name}(METRIC{ARGUMENTS.get(name, '')}){windows}")


def _points(metric: str, window: Mapping[str, float], curves: Mapping[str, Curve]) -> tuple[list[float], list[int]]:
    """Return (values, steps) of a metric in a window, with at least one value. Raises NoValue."""
    if metric not in curves:
        near = difflib.get_close_matches(metric, curves, 1)
        raise NoValue(f"metrics.jsonl has no {metric}" + (f"; did you mean {near[0]}?" if near else ""))
    steps = curves[metric].steps
    low, high = window.get("from", steps[0]), window.get("to", steps[-1])
    points = [(value, step) for step, value in zip(steps, curves[metric].values, strict=True) if low <= step <= high]
    if not points:
        bounds = " ".join(f"{key} step {window[key]:g}" for key in ("from", "to") if key in window)
        raise NoValue(f"{metric} has no value {bounds}; it has values from step {steps[0]} to {steps[-1]}")
    if (count := int(window.get("last", len(points)))) > len(points):
        raise NoValue(f"{metric} has {len(points)} values; expected at least {count} for last={count}")
    if unknown := [step for value, step in points[-count:] if value is None]:
        raise NoValue(f"{metric} is not a finite number at step {unknown[0]}")
    return [value for value, _ in points[-count:] if value is not None], [step for _, step in points[-count:]]


def _area(values: list[float], steps: list[int]) -> float:
    return float(np.trapezoid(values, steps)) / (steps[-1] - steps[0]) if len(values) > 1 else values[0]


STATISTICS: dict[str, Callable[..., float]] = {
    "first": lambda values, steps: values[0],
    "last": lambda values, steps: values[-1],
    "min": lambda values, steps: min(values),
    "max": lambda values, steps: max(values),
    "mean": lambda values, steps: statistics.fmean(values),
    "median": lambda values, steps: statistics.median(values),
    "at": lambda values, steps: values[0],
    "quantile": lambda values, steps, share: float(np.quantile(values, share)),
    "area": _area,
}
"""Name -> function of the values and the steps in a window, and of the number after the metric's name."""
ARGUMENTS = {"at": ", STEP", "quantile": ", NUMBER FROM 0 TO 1"}
