"""What a chart shows, as data for charts.js, which draws it as SVG in the browser.

Every series belongs to a run: the page has one colour for it and one button that hides it in all charts. Charts with the same
x_label share their x axis and the cursor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launch.pages.html import Html, data, tag

POINTS = 1000
"""Numbers of one series at most: a chart is seldom wider in pixels."""
COLOURS = 8
"""That page.css has; further runs begin again, dashed."""


@dataclass(frozen=True)
class Series:
    """x ascends. A value that is None or not finite is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]  # of a band: its middle, or empty
    run: int = 0
    kind: Literal["line", "points", "band"] = "line"  # points: what is measured now and then, such as validation
    low: Sequence[float | None] = ()  # of a band
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Mark:
    """Something that happened at an x, e.g. a restart."""

    x: float
    label: str
    run: int = 0


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    unit: str = ""  # "s", "B" ...: numbers get 1000-fold prefixes before it
    x_label: str = "step"
    stacked: bool = False  # the series are layers of one run, from the bottom up, each with its own colour
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[float, str]] = ()  # horizontal lines with their names, e.g. the limits of a gate
    note: str = ""  # below the title
    points: int = field(default=POINTS, kw_only=True)  # POINTS, for fewer


def figure(chart: Chart) -> Html:
    """The chart, to be put into a document's section."""
    series = [_fewer(each, chart.points, chart.stacked) for each in chart.series]
    bucket = max(
        (len(whole.x) / len(thin.x) for thin, whole in zip(series, chart.series, strict=True) if len(thin.x)), default=1
    )
    thinned = "" if bucket == 1 else f"means{'' if chart.stacked else ' and extremes'} of up to {math.ceil(bucket)} steps"
    note = "; ".join(filter(None, [chart.note, thinned]))
    packed = {
        "title": chart.title,
        "unit": chart.unit,
        "x_label": chart.x_label,
        "stacked": chart.stacked,
        "series": [_packed(each) for each in series],
        "marks": [{"x": mark.x, "label": mark.label, "run": mark.run} for mark in chart.marks],
        "levels": [{"y": y, "label": label} for y, label in chart.levels],
    }
    caption = tag("figcaption", tag("h3", chart.title), tag("p", note) if note else None)
    return tag("figure", caption, data(packed, "chart-data"), class_="chart")


def figures(charts: Sequence[Chart]) -> Html:
    """Charts in as many columns as there is room for."""
    return tag("div", *map(figure, charts), class_="charts")


def _packed(series: Series) -> dict[str, object]:
    columns = {"x": series.x, "y": series.y, "low": series.low, "high": series.high}
    packed = {key: [_short(value) for value in column] for key, column in columns.items() if len(column)}
    return {"name": series.name, "run": series.run, "kind": series.kind, **packed}


def _short(value: float | None) -> float | None:
    """Six digits, None where it is no number."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.6g}")


# ---- fewer points -----------------------------------------------------------------------------------------------------------


def _fewer(series: Series, most: int, stacked: bool) -> Series:
    """A line becomes its buckets' means in a band from their least to their greatest values, so that no peak is lost."""
    if len(series.x) <= most:
        return series
    if series.kind != "line":
        return _extremes(series, most)
    buckets = _buckets(len(series.x), most if stacked else most // 3)
    x = [series.x[bucket[-1]] for bucket in buckets]
    values = [[value for i in bucket if (value := _or(series.y[i], None)) is not None] for bucket in buckets]
    y = [sum(each) / len(each) if each else None for each in values]
    if stacked:  # layers that are drawn on each other must stay additive
        return replace(series, x=x, y=y)
    low, high = [min(each, default=None) for each in values], [max(each, default=None) for each in values]
    return replace(series, x=x, y=y, kind="band", low=low, high=high)


def _extremes(series: Series, most: int) -> Series:
    """Of each bucket the points where the series is least and greatest, and both ends."""
    below, above = (series.low, series.high) if series.kind == "band" else (series.y, series.y)
    kept = {0, len(series.x) - 1}
    for bucket in _buckets(len(series.x), most // 2 - 1):
        kept.add(min(bucket, key=lambda i: _or(below[i], math.inf)))
        kept.add(max(bucket, key=lambda i: _or(above[i], -math.inf)))
    columns = {name: getattr(series, name) for name in ("x", "y", "low", "high")}
    return replace(series, **{name: [column[i] for i in sorted(kept)] for name, column in columns.items() if len(column)})


def _buckets(length: int, count: int) -> list[range]:
    """Consecutive ranges of nearly equal length that cover `length` indices, of which there are more than `count`."""
    edges = [length * i // count for i in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def _or(value: float | None, otherwise: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else otherwise
