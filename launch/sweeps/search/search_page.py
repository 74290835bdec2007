"""Write a search's report as HTML: the best trial, best values, parallel coordinates, importances, curves, trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from launch.drawing.html import Html, table, tag
from launch.pages.chart import Chart, Series, drawing, figures, plotly_text
from launch.pages.document import Section, details, document
from launch.sweeps import suite as suites
from launch.sweeps.search import space
from launch.sweeps.search.config import ParameterConfig
from launch.sweeps.search.trials import SearchResult, TrialResult
from launch.sweeps.suite import Suite

CLASSES = {"complete": "good", "pruned": "warn", "failed": "bad"}
BEST_SHARE = 4  # one complete trial of so many is drawn as one of the best
DIGITS = 5  # of a value in a table


def page(result: SearchResult, suite: Suite) -> str:
    """Return the report's HTML."""
    intro = tag("p", f"{result.summary} · {result.search.metric}, {result.search.direction} · {result.search.sampler}")
    sections = [*_best(result), *_over_trials(result), *_parallel(result), *_importances(result), *_curves(result)]
    names = [entry.trial.name for entry in result.trials]
    resolved = Section("Suite", [details("suite.yaml, resolved", tag("pre", suites.to_yaml(suite)))])
    return document(result.title, [*sections, _trials(result), resolved], names, intro)


def _number(value: Any) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _link(result: SearchResult, entry: TrialResult) -> Html:
    return tag("a", entry.trial.name, href=f"{entry.run_dir.relative_to(result.folder)}/")


def _best(result: SearchResult) -> Iterator[Section]:
    if (best := result.best) is None:
        return
    command = f"python launch/submit.py recipe={result.search.recipe} {' '.join(space.as_overrides(best.trial.values))}"
    value = tag("p", f"{result.search.metric} {_number(best.trial.value)} in ", _link(result, best))
    rows = [[key, _number(value)] for key, value in best.trial.values.items()]
    yield Section("Best", [value, table(["parameter", "value"], rows), tag("pre", command)])


# ---- over trials --------------------------------------------------------------------------------------------------------


def _over_trials(result: SearchResult) -> Iterator[Section]:
    complete = [entry for entry in result.trials if entry.trial.state == "complete"]
    if not complete:
        return
    sign = max if result.search.direction == "maximize" else min
    values = [entry.trial.value or 0.0 for entry in complete]
    line = {
        "x": [entry.trial.number for entry in complete],
        "y": [sign(values[: i + 1]) for i in range(len(values))],
        "mode": "lines",
        "line": {"color": "var(--c0)", "width": 2, "shape": "hv"},
        "hoverinfo": "skip",
    }
    looks = {"complete": ("var(--c0)", "circle"), "pruned": ("var(--c7)", "circle-open")}
    traces = [line, *(_dots(result, state, *look) for state, look in looks.items())]
    layout = {
        "height": 260,
        "xaxis": {"title": {"text": "trial"}},
        "yaxis": {"title": {"text": plotly_text(result.search.metric)}},
    }
    note = "The best value so far, each complete trial, and the last value of each pruned one (open)."
    yield Section("Best value over trials", [drawing(result.search.metric, traces, layout)], note)


def _dots(result: SearchResult, state: str, colour: str, symbol: str) -> dict[str, Any]:
    trials = [entry for entry in result.trials if entry.trial.state == state and entry.trial.value is not None]
    return {
        "x": [entry.trial.number for entry in trials],
        "y": [entry.trial.value for entry in trials],
        "text": [_hover(result, entry) for entry in trials],
        "mode": "markers",
        "marker": {"color": colour, "size": 7, "symbol": symbol},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(result: SearchResult, entry: TrialResult) -> str:
    lines = [
        f"{entry.trial.name}, {entry.trial.state}",
        *(f"{key} {_number(value)}" for key, value in entry.trial.values.items()),
    ]
    lines.append(f"{result.search.metric} {_number(entry.trial.value)}")
    return "<br>".join(map(plotly_text, lines))


# ---- parallel coordinates ---------------------------------------------------------------------------------------------------


def _parallel(result: SearchResult) -> Iterator[Section]:
    """Yield the parallel coordinates: a line per trial across one axis per parameter and one for the metric.

    Each axis runs from its lowest to its highest value.
    """
    trials = [entry for entry in result.trials if entry.trial.value is not None]
    if not trials:
        return
    keys = [*result.search.parameters]
    measured = [entry.trial.value or 0.0 for entry in trials]
    low, high = min(measured), max(measured)
    good = _good(result)
    traces = []
    for entry in sorted(trials, key=lambda entry: entry.trial.number in good):  # the best above the others
        heights = [_height(result.search.parameters[key], entry.trial.values[key]) for key in keys]
        heights.append(0.5 if high == low else ((entry.trial.value or 0.0) - low) / (high - low))
        colour = "var(--c1)" if entry.trial.number in good else "var(--c0)"
        dash = "dot" if entry.trial.state == "pruned" else "solid"
        look = {"color": colour, "width": 2 if entry.trial.number in good else 1, "dash": dash}
        text = [_hover(result, entry)] * len(heights)
        traces.append(
            {
                "x": list(range(len(heights))),
                "y": heights,
                "mode": "lines+markers",
                "line": look,
                "text": text,
                "marker": {"color": colour, "size": 4},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    ends = [(*_labels(result.search.parameters[key]),) for key in keys] + [(_number(low), _number(high))]
    note = f"Orange: the best {len(good)} of the complete trials. Dotted: pruned ones, at their last value."
    figure = drawing("Parameters and metric", traces, _axes([*keys, result.search.metric], ends))
    yield Section("Parallel coordinates", [figure], note)


def _good(result: SearchResult) -> set[int]:
    """Return the numbers of the best complete trials, which the plots highlight."""
    complete = [entry.trial for entry in result.trials if entry.trial.state == "complete"]
    ordered = sorted(complete, key=lambda trial: trial.value or 0.0, reverse=result.search.direction == "maximize")
    return {trial.number for trial in ordered[: math.ceil(len(ordered) / BEST_SHARE)]}


def _height(parameter: ParameterConfig, value: Any) -> float:
    """Return the position of a value on its parameter's axis, from 0 to 1."""
    if parameter.choices is not None:
        return parameter.choices.index(value) / max(1, len(parameter.choices) - 1)
    assert parameter.low is not None and parameter.high is not None, "a range has both ends"
    scale = math.log if parameter.log else float
    return (scale(value) - scale(parameter.low)) / (scale(parameter.high) - scale(parameter.low))


def _labels(parameter: ParameterConfig) -> tuple[str, str]:
    if parameter.choices is not None:
        return _number(parameter.choices[0]), _number(parameter.choices[-1])
    return _number(parameter.low), _number(parameter.high)


def _axes(names: Sequence[str], ends: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the Plotly layout of vertical axes. names: shown below them. ends: (lowest, highest) label of each axis."""
    common = {"showarrow": False, "xanchor": "left", "xshift": 4}
    notes = [
        {**common, "x": i, "y": y, "text": plotly_text(end), "yshift": shift}
        for i, pair in enumerate(ends)
        for y, end, shift in zip((0, 1), pair, (-8, 8), strict=True)
    ]
    lines = [
        {"type": "line", "x0": i, "x1": i, "y0": 0, "y1": 1, "line": {"color": "var(--line)", "width": 1}, "layer": "below"}
        for i in range(len(names))
    ]
    labels = [plotly_text(name.rpartition(".")[2]) for name in names]
    ticks = {"tickvals": [*range(len(names))], "ticktext": labels, "showgrid": False, "range": [-0.1, len(names) - 0.6]}
    return {
        "height": 320,
        "xaxis": ticks,
        "yaxis": {"visible": False, "range": [-0.12, 1.12]},
        "annotations": notes,
        "shapes": lines,
    }


# ---- importances, curves, trials ------------------------------------------------------------------------------------------


def _importances(result: SearchResult) -> Iterator[Section]:
    if not result.importances:
        return
    shares = dict(reversed([*result.importances.items()]))  # Plotly draws bars from the bottom up
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [*shares.values()],
        "y": [plotly_text(key) for key in shares],
        "marker": {"color": "var(--c0)"},
        "hovertemplate": "%{x:.3f}<extra></extra>",
    }
    layout = {"height": 90 + 28 * len(shares), "xaxis": {"range": [0, 1], "title": {"text": "share"}}}
    note = "Shares by PED-ANOVA: how much the better trials gather in values of each parameter. Few trials say little."
    yield Section("Importance", [drawing("Importance of the parameters", [bars], layout)], note)


def _curves(result: SearchResult) -> Iterator[Section]:
    """Yield the metric of every trial over its steps, as the trial reported it for pruning."""
    series = [
        Series(entry.trial.name, [*entry.trial.reports], [*entry.trial.reports.values()], i)
        for i, entry in enumerate(result.trials)
        if entry.trial.reports
    ]
    if series:
        names = [entry.trial.name for entry in result.trials]
        yield Section("Curves", [figures([Chart(result.search.metric, series)], names)], "The metric of each trial by step.")


def _trials(result: SearchResult) -> Section:
    header = ["trial", "", result.search.metric, *result.search.parameters, "step", f"{result.unit}-seconds", "recipe", "why"]
    rows = []
    for entry in result.trials:
        trial, cost = entry.trial, f"{entry.seconds * entry.devices:.0f}"
        state = tag("span", trial.state, class_=CLASSES.get(trial.state))
        value = "" if trial.value is None else _number(trial.value)
        reason = f"pruned at step {trial.pruned_at}" if trial.state == "pruned" else trial.why
        recipe = tag("a", "recipe.yaml", href=f"{entry.run_dir.relative_to(result.folder)}/recipe.yaml")
        values = [_number(trial.values[key]) for key in result.search.parameters]
        rows.append([_link(result, entry), state, value, *values, entry.step, cost, recipe, reason])
    return Section("Trials", [table(header, rows)])
