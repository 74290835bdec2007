"""Build charts with legends from series of numbers. They contain traces for Plotly, which charts.js draws in the browser.

Every series belongs to a run. A page has one colour for each run, and one button that hides the run in all charts. All charts
of a page have the same steps on their x axis. Colours are CSS variables such as `var(--c0)`; page.css defines one set of them
for light pages and one for dark pages.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from launch.drawing.html import Html, data, tag

POINTS = 1000
"""Maximum number of points of a series. Charts are seldom more pixels wide."""
BARS = 400
"""Maximum number of bars in one layer of a stack."""
COLOURS = 8
"""Number of colours in page.css. Further runs use them again, with dashed lines."""
NAMED = 3
"""Maximum number of runs that a legend names. With more runs it shows only colours."""
DASHES = ("solid", "dot", "dash", "dashdot")
"""Dash styles of the lines of one run in a chart."""


@dataclass(frozen=True)
class Series:
    """The values of one run in a chart. x ascends; a y that is None or not finite is a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]  # for a band: its middle line, or empty
    run: int = 0
    kind: Literal["line", "points", "band"] = "line"  # points: occasional values, such as validation
    low: Sequence[float | None] = ()  # lower edge of a band
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Mark:
    """An event at an x, for example a restart."""

    x: float
    label: str
    run: int = 0


@dataclass(frozen=True)
class Chart:
    """One chart: its series over steps, with marks, levels and a note."""

    title: str
    series: Sequence[Series]
    unit: str = ""  # "s", "B" ...
    stacked: bool = False  # the series are layers of one run, from the bottom up, each with its own colour
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[float, str]] = ()  # horizontal lines with their names, e.g. the limits of a gate
    note: str = ""  # below the title
    points: int = field(default=POINTS, kw_only=True)  # maximum number of points of a series


def figures(charts: Sequence[Chart], runs: Sequence[str] = ("",)) -> Html:
    """Return the charts in a grid with as many columns as fit on the page. runs: the names of the page's runs."""
    return tag("div", *(figure(chart, runs) for chart in charts), class_="charts")


def figure(chart: Chart, runs: Sequence[str] = ("",)) -> Html:
    """Return a chart with its title, its note and a legend, into which charts.js writes the values at the cursor.

    runs: the names of the page's runs.
    """
    most = min(BARS, chart.points) if chart.stacked else chart.points
    series = [_fewer(line, most, chart.stacked) for line in chart.series]
    bucket = max(
        (len(original.x) / len(thin.x) for thin, original in zip(series, chart.series, strict=True) if len(thin.x)), default=1
    )
    thinned = "" if bucket == 1 else f"means{'' if chart.stacked else ' and extremes'} of up to {math.ceil(bucket)} steps"
    note = "; ".join(filter(None, [chart.note, thinned]))
    colours = [i if chart.stacked else line.run for i, line in enumerate(series)]
    names = [_label(chart, line, runs) for line in series]
    traces = [_trace(chart, *line) for line in zip(series, names, colours, _dashes(chart), strict=True)]
    packed = {
        "title": chart.title,
        "unit": chart.unit,
        "data": [*traces, *_marks(chart.marks)],
        "layout": _layout(chart, series),
    }
    named = len(runs) <= NAMED or chart.stacked
    legend = []
    for line, name, colour in zip(series, names, colours, strict=True):
        label = f"{name} " if named and name else None
        legend.append(tag("span", swatch(colour, line.kind), label, tag("span", class_="value"), data_run=line.run, title=name))
    caption = tag("figcaption", tag("h3", chart.title), tag("p", note) if note else None)
    table = tag("details", tag("summary", "data"))
    return tag("figure", caption, tag("div", *legend, class_="legend"), data(packed, "chart-data"), table, class_="chart")


def swatch(colour: int, kind: str = "line") -> Html:
    """Return a small square in a run's colour, to be shown before its name; for points a circle."""
    look = " points" if kind == "points" else " dashed" if colour >= COLOURS else ""
    return tag("span", class_=f"swatch c{colour % COLOURS}{look}", aria_hidden="true")


def _label(chart: Chart, series: Series, runs: Sequence[str]) -> str:
    if chart.stacked:
        return series.name  # the title names the run
    alone = all(series_of_chart.name == series.name for series_of_chart in chart.series)
    return " ".join(filter(None, [runs[series.run] if len(runs) > 1 else "", "" if alone else series.name]))


# ---- traces -----------------------------------------------------------------------------------------------------------------


def _trace(chart: Chart, series: Series, name: str, colour: int, dash: str) -> dict[str, Any]:
    """Return the Plotly trace of a series.

    charts.js reads two of its entries: `meta`, with the run and whether to smooth the line, and `customdata`, with the edges of
    the band.
    """
    ink = f"var(--c{colour % COLOURS})"
    trace = {
        "name": plotly_text(name),
        "x": _short(series.x),
        "y": _short(series.y if len(series.y) else series.high),
        "hoverinfo": "none",
        "meta": {"run": series.run},
    }
    if chart.stacked:
        width = max((after - before for before, after in itertools.pairwise(series.x)), default=1)
        return trace | {"type": "bar", "width": width, "marker": {"color": ink, "line": {"width": 0}}}
    if len(series.low):
        trace["customdata"] = [[*pair] for pair in zip(_short(series.low), _short(series.high), strict=True)]
    if series.kind == "points":
        look = {"mode": "lines+markers", "line": {"color": ink, "width": 1, "dash": "2px,3px"}}
        dot = {"size": 7, "color": "var(--panel)", "line": {"width": 1.8, "color": ink}, "opacity": 1}
        return trace | look | {"marker": dot, "cliponaxis": False}
    trace["line"] = {"color": ink, "width": 1.6 if len(series.y) else 0, "dash": "dash" if colour >= COLOURS else dash}
    trace["meta"]["smooth"] = bool(len(series.y))
    alone = _alone(trace["y"]) if len(series.y) else []
    if not any(alone):
        return trace | {"mode": "lines"}
    return trace | {"mode": "lines+markers", "marker": {"color": ink, "size": [4 if is_alone else 0 for is_alone in alone]}}


def _dashes(chart: Chart) -> Iterator[str]:
    """Yield the dash style of each series. A run's first line has the first of DASHES, its second line the second."""
    for i, series in enumerate(chart.series):
        yield DASHES[sum(earlier.run == series.run and earlier.kind == "line" for earlier in chart.series[:i]) % len(DASHES)]


def _alone(values: list[float | None]) -> list[bool]:
    """Return, for each value, whether it is a number between two gaps, which a line without markers would not show."""
    around = [None, *values, None]
    return [b is not None and a is None and c is None for a, b, c in zip(around, values, around[2:], strict=False)]


def _marks(marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    """Yield a trace for each run that has marks. A mark is a dashed line over the whole height, with a flag at the bottom."""
    for run, of in itertools.groupby(sorted(marks, key=lambda mark: mark.run), key=lambda mark: mark.run):
        marks_of_run = list(of)
        ink = f"var(--c{run % COLOURS})"
        yield {
            "name": "",
            "x": [x for mark in marks_of_run for x in (*_short([mark.x, mark.x]), None)],
            "y": [0.03, 1, None] * len(marks_of_run),
            "text": [label for mark in marks_of_run for label in (plotly_text(mark.label), "", "")],
            "yaxis": "y2",
            "mode": "lines+markers",
            "line": {"color": ink, "width": 1, "dash": "2px,3px"},
            "marker": {"color": ink, "symbol": "triangle-up", "size": [9, 0, 0] * len(marks_of_run), "opacity": 1},
            "hovertemplate": "%{text}<extra></extra>",
            "meta": {"run": run, "mark": True},
        }


def _layout(chart: Chart, series: Sequence[Series]) -> dict[str, Any]:
    """Return the part of Plotly's layout that depends on the chart. charts.js adds the part that all charts share."""
    levels = [value for value, _ in chart.levels]
    values = [*levels, *(value for line in series for column in (line.y, line.low, line.high) for value in column)]
    finite = [value for value in values if _finite(value) is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    axis: dict[str, Any] = {"exponentformat": "SI"} if max(high, -low) >= 1e-3 else {"tickformat": "~e"}
    if chart.unit == "B":
        axis = {"tickformat": "~s", "ticksuffix": "B"}
    if not chart.stacked and high - low < (least := 1e-4 * max(abs(low), abs(high))):  # smaller differences are rounding errors
        axis["range"] = _short([low - 1e3 * least, high + 1e3 * least])
    elif low == high == 0:
        axis["range"] = [-0.1, 0.1]
    elif 0 <= low < 0.06 * (high - low):
        axis["rangemode"] = "tozero"
    shapes = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": value,
            "y1": value,
            "line": {"color": "var(--bad)", "width": 1.2, "dash": "6px,4px"},
            "label": {"text": plotly_text(name), "textposition": "end", "yanchor": "bottom", "font": {"size": 11}},
        }
        for value, name in chart.levels
    ]
    return {"yaxis": axis, "shapes": shapes}


def plotly_text(text: str) -> str:
    """Return a text broken into lines that fit into a chart, and escaped, because Plotly interprets <b> and <a>."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, 50))


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Return the values with six significant digits; None for those that are not finite."""
    return [None if (finite := _finite(value)) is None else _six_digits(finite) for value in values]


def _six_digits(value: float) -> float:
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---- fewer points -----------------------------------------------------------------------------------------------------------


def _fewer(series: Series, most: int, stacked: bool) -> Series:
    """Return a series with at most `most` points; the series itself if it has no more.

    A line becomes the means of buckets, with a band from the least to the greatest value of each bucket, so that no peak is
    lost. A layer of a stack becomes only the means. Points and bands keep the extremes of each bucket.
    """
    if len(series.x) <= most:
        return series
    if series.kind != "line":
        return _extremes(series, most)
    buckets = _buckets(len(series.x), most if stacked else most // 3)
    x = [series.x[bucket[-1]] for bucket in buckets]
    values = [[value for i in bucket if (value := _finite(series.y[i])) is not None] for bucket in buckets]
    y = [sum(bucket_values) / len(bucket_values) if bucket_values else None for bucket_values in values]
    if stacked:  # layers that are drawn on each other must stay additive
        return replace(series, x=x, y=y)
    low, high = (
        [min(bucket_values, default=None) for bucket_values in values],
        [max(bucket_values, default=None) for bucket_values in values],
    )
    return replace(series, x=x, y=y, kind="band", low=low, high=high)


def _extremes(series: Series, most: int) -> Series:
    """Return a series with at most `most` of its points: the least and the greatest of each bucket, the first and the last."""
    below, above = (series.low, series.high) if series.kind == "band" else (series.y, series.y)
    indices = {0, len(series.x) - 1}
    for bucket in _buckets(len(series.x), most // 2 - 1):
        lows, highs = ({i: value for i in bucket if (value := _finite(of[i])) is not None} for of in (below, above))
        finite = [i for i in bucket if i in lows and i in highs]
        indices |= {min(finite, key=lows.__getitem__), max(finite, key=highs.__getitem__)} if finite else {bucket[0]}
    columns = {name: getattr(series, name) for name in ("x", "y", "low", "high")}
    return replace(series, **{name: [column[i] for i in sorted(indices)] for name, column in columns.items() if len(column)})


def _buckets(length: int, count: int) -> list[range]:
    """Return `count` consecutive ranges of nearly equal length that cover the indices below `length`.

    length: more than `count`.
    """
    edges = [length * i // count for i in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


# ---- figures with axes of their own ---------------------------------------------------------------------------------------


def drawing(title: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], note: str = "") -> Html:
    """Return a figure with axes of its own, with its title and a note below the title.

    Texts in `traces` and `layout` must be escaped by `plotly_text`.
    """
    caption = tag("figcaption", tag("h3", title), tag("p", note) if note else None)
    return tag("figure", caption, data({"data": list(traces), "layout": layout}, "drawing-data"), class_="drawing")
