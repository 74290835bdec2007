"""The metric of a search: an expression over a run's metrics, at each step and at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.sweeps import expressions, measurements
from launch.sweeps.expressions import Curve, Expression
from pipeline.observe import metrics

NAME = re.compile(r"[A-Za-z_][\w./:-]*")


def parse(text: str) -> Expression:
    """Return a search's metric as an expression; a metric's name alone stands for its last value.

    Raises expressions.Malformed.
    """
    return expressions.parse(f"last({text})" if NAME.fullmatch(text.strip()) else text)


def curves(run_dir: Path) -> dict[str, Curve]:
    """Return metric -> its curve so far, for a run. Raises RecipeError for a malformed metrics.jsonl."""
    return measurements.curves(metrics.read(run_dir / "metrics.jsonl"))


def by_step(expression: Expression, curves: Mapping[str, Curve], after: int = -1) -> Iterator[tuple[int, float]]:
    """Yield (step, value of the expression over the run's steps so far), for steps > `after`.

    Only steps at which a metric of the expression was recorded count. Steps where the expression has no value yet are left out,
    such as those before `last=10` has ten values. The value is NaN where a metric is not finite.
    """
    names = [name for name in dict.fromkeys(expressions.metrics(expression)) if name in curves]
    steps = sorted({step for name in names for step in curves[name].steps if step > after})
    for step in steps:
        so_far = {name: _until(curves[name], step) for name in names}
        if any(curve.steps and curve.steps[-1] == step and curve.values[-1] is None for curve in so_far.values()):
            yield step, math.nan
            continue
        try:
            yield step, expressions.evaluate(expression, {name: curve for name, curve in so_far.items() if curve.steps})
        except expressions.NoValue:
            continue


def _until(curve: Curve, step: int) -> Curve:
    count = sum(other <= step for other in curve.steps)
    return Curve(curve.steps[:count], curve.values[:count])
