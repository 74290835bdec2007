"""Define the trials of a search, collect what their runs cost and what pruning saved, and write the report as HTML.

The page shows the best trial, the best values over trials, parallel coordinates, importances, curves, and all trials.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from launch.drawing.html import Html, table, tag
from launch.pages.chart import Chart, Series, drawing, figures, plotly_text
from launch.pages.document import Section, document
from launch.runs.run_folder import RunFolder
from launch.sweeps.expressions import RunMeasurements, measure
from launch.sweeps.search_space import ParameterConfig, SearchConfig, Values
from launch.sweeps.suite import Suite, as_arguments
from launch.sweeps.sweep_folder import SweepFolder
from launch.sweeps.verdict import suite_section

CLASSES = {"complete": "good", "pruned": "warn", "failed": "bad"}
BEST_SHARE = 4  # one complete trial of so many is drawn as one of the best
DIGITS = 5  # of a value in a table

StateOfTrial = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """Holds the parameter values of a trial, and what its run has reported."""

    number: int
    state: StateOfTrial
    values: Values
    reports: Mapping[int, float]  # the metric by step; NaN where it was not finite
    value: float | None  # the metric at the end; of a pruned trial the last one reported; None without one
    why: str = ""  # of a failed trial
    pruned_at: int | None = None  # the step at which it was decided to stop the trial

    @property
    def name(self) -> str:
        """Name of the trial's job and of its run folder."""
        return f"trial-{self.number:04d}"


@dataclass(frozen=True)
class TrialResult:
    """Holds a trial and the measurements of its run."""

    trial: Trial
    measured: RunMeasurements
    devices: int  # GPUs of its job; ranks if it has no GPUs

    @property
    def cost(self) -> float:
        """Device-seconds of the run."""
        return self.measured.seconds * self.devices

    @property
    def step(self) -> int:
        """The last step of the run."""
        return max((curve.steps[-1] for curve in self.measured.curves.values() if curve.steps), default=0)

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step; 0 before the first step."""
        curve = self.measured.curves.get("time/step")
        return statistics.median([value for value in curve.values if value is not None] or [0.0]) if curve else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the entry of the trial in verdict.json."""
        reports = {step: value if math.isfinite(value) else None for step, value in self.trial.reports.items()}
        measured = {"name": self.trial.name, "seconds": self.measured.seconds, "devices": self.devices}
        return {**asdict(self.trial), "reports": reports, **measured}


@dataclass(frozen=True)
class SearchResult:
    """Holds a search, and everything that its report shows."""

    title: str
    folder: Path
    search: SearchConfig
    trials: Sequence[TrialResult]
    importances: Mapping[str, float]  # shares, largest first; empty if they are not known
    max_steps: int | None
    unit: str  # GPU or rank

    def of_state(self, state: StateOfTrial) -> list[TrialResult]:
        """Return the trials in a state."""
        return [entry for entry in self.trials if entry.trial.state == state]

    @property
    def ranking(self) -> list[TrialResult]:
        """The complete trials, the best one first, of equal ones the earliest."""
        sign = -1 if self.search.direction == "maximize" else 1
        return sorted(self.of_state("complete"), key=lambda entry: sign * (entry.trial.value or 0.0))

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the best value; None without a complete trial."""
        return next(iter(self.ranking), None)

    def command(self, entry: TrialResult) -> str:
        """Return the command that runs the recipe with the values of a trial."""
        return f"python launch/submit.py recipe={self.search.recipe} {' '.join(as_arguments(entry.trial.values))}"

    @property
    def summary(self) -> str:
        """The result of the search in one line.

        Pruning saved the steps that pruned trials did not run, times their median step time.
        """
        counts = {state: len(self.of_state(state)) for state in ("complete", "pruned", "failed", "running")}
        states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        cost = f"{sum(entry.cost for entry in self.trials):,.0f} {self.unit}-seconds"
        pruned = self.of_state("pruned")
        seconds = [((self.max_steps or entry.step) - entry.step) * entry.step_seconds * entry.devices for entry in pruned]
        saved = f", pruning saved about {sum(seconds):,.0f}" if pruned else ""
        number = self.search.number_of_trials
        return f"{self.title}: {len(self.trials)} of {number} trials: {states or 'none'}; {cost}{saved}"


def result(
    folder: SweepFolder,
    search: SearchConfig,
    trials: Sequence[Trial],
    importances: Mapping[str, float],
    max_steps: int | None,
) -> SearchResult:
    """Read the runs of all trials, and return the result of the search.

    max_steps: the number of steps of a trial. Raises RecipeError for a malformed metrics.jsonl.
    """
    results, units = [], set()
    for trial in trials:
        run_dir = folder.path / "runs" / trial.name
        devices = 0
        if (run_dir / "recipe.yaml").exists():  # it has been submitted
            submitted = RunFolder.at(run_dir)
            ranks = sum(part.get("nodes", 1) * (part.get("ranks_per_node") or 1) for part in submitted.components.values())
            devices = submitted.gpus or ranks
            units.add("GPU" if submitted.gpus else "rank")
        results.append(TrialResult(trial, measure(run_dir), devices))
    unit = units.pop() if len(units) == 1 else "device"
    return SearchResult(folder.title, folder.path, search, results, importances, max_steps, unit)


# ---- the page -----------------------------------------------------------------------------------------------------------


def page(result: SearchResult, suite: Suite) -> str:
    """Return the report's HTML."""
    intro = tag("p", f"{result.summary} · {result.search.metric}, {result.search.direction} · {result.search.sampler}")
    sections = [*_best(result), *_over_trials(result), *_parallel(result), *_importances(result), *_curves(result)]
    names = [entry.trial.name for entry in result.trials]
    return document(result.title, [*sections, _trials(result), suite_section(suite)], names, intro)


def _number(value: Any) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _link(trial: Trial) -> Html:
    return tag("a", trial.name, href=f"runs/{trial.name}/")


def _best(result: SearchResult) -> Iterator[Section]:
    if (best := result.best) is None:
        return
    value = tag("p", f"{result.search.metric} {_number(best.trial.value)} in ", _link(best.trial))
    rows = [[key, _number(value)] for key, value in best.trial.values.items()]
    yield Section("Best", [value, table(["parameter", "value"], rows), tag("pre", result.command(best))])


# ---- drawings -----------------------------------------------------------------------------------------------------------


def _over_trials(result: SearchResult) -> Iterator[Section]:
    complete = result.of_state("complete")
    if not complete:
        return
    better = max if result.search.direction == "maximize" else min
    values = [entry.trial.value or 0.0 for entry in complete]
    line = {
        "x": [entry.trial.number for entry in complete],
        "y": [better(values[: i + 1]) for i in range(len(values))],
        "mode": "lines",
        "line": {"color": "var(--c0)", "width": 2, "shape": "hv"},
        "hoverinfo": "skip",
    }
    pruned = [entry for entry in result.of_state("pruned") if entry.trial.value is not None]
    traces = [line, _dots(result, complete, "var(--c0)", "circle"), _dots(result, pruned, "var(--c7)", "circle-open")]
    metric = plotly_text(result.search.metric)
    layout = {"height": 260, "xaxis": {"title": {"text": "trial"}}, "yaxis": {"title": {"text": metric}}}
    note = "The best value so far, each complete trial, and the last value of each pruned one (open)."
    yield Section("Best value over trials", [drawing(result.search.metric, traces, layout)], note)


def _dots(result: SearchResult, entries: Sequence[TrialResult], colour: str, symbol: str) -> dict[str, Any]:
    return {
        "x": [entry.trial.number for entry in entries],
        "y": [entry.trial.value for entry in entries],
        "text": [_hover(result, entry) for entry in entries],
        "mode": "markers",
        "marker": {"color": colour, "size": 7, "symbol": symbol},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(result: SearchResult, entry: TrialResult) -> str:
    values = {**entry.trial.values, result.search.metric: entry.trial.value}
    lines = [f"{entry.trial.name}, {entry.trial.state}", *(f"{key} {_number(value)}" for key, value in values.items())]
    return "<br>".join(map(plotly_text, lines))


def _parallel(result: SearchResult) -> Iterator[Section]:
    """Yield the parallel coordinates: a line per trial across one axis per parameter and one for the metric.

    Each axis runs from its lowest to its highest value, which are beside its ends.
    """
    entries = [entry for entry in result.trials if entry.trial.value is not None]
    if not entries:
        return
    measured = [entry.trial.value or 0.0 for entry in entries]
    axes = {**result.search.parameters, result.search.metric: ParameterConfig(low=min(measured), high=max(measured))}
    good = {entry.trial.number for entry in result.ranking[: math.ceil(len(result.ranking) / BEST_SHARE)]}
    traces = []
    for entry in sorted(entries, key=lambda entry: entry.trial.number in good):  # the best above the others
        values = {**entry.trial.values, result.search.metric: entry.trial.value}
        is_good = entry.trial.number in good
        colour = "var(--c1)" if is_good else "var(--c0)"
        dash = "dot" if entry.trial.state == "pruned" else "solid"
        traces.append(
            {
                "x": [*range(len(axes))],
                "y": [_height(axis, values[key]) for key, axis in axes.items()],
                "mode": "lines+markers",
                "line": {"color": colour, "width": 2 if is_good else 1, "dash": dash},
                "text": [_hover(result, entry)] * len(axes),
                "marker": {"color": colour, "size": 4},
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    ends = [axis.choices or [axis.low, axis.high] for axis in axes.values()]
    beside = {"showarrow": False, "xanchor": "left", "xshift": 4}
    labels = [
        {**beside, "x": i, "y": y, "text": plotly_text(_number(end)), "yshift": shift}
        for i, values in enumerate(ends)
        for y, end, shift in ((0, values[0], -8), (1, values[-1], 8))
    ]
    names = [plotly_text(key.rpartition(".")[2]) for key in axes]
    ticks = {"tickvals": [*range(len(axes))], "ticktext": names, "range": [-0.1, len(axes) - 0.6]}
    hidden = {"visible": False, "range": [-0.12, 1.12]}
    layout = {"height": 320, "xaxis": ticks, "yaxis": hidden, "annotations": labels}
    note = f"Orange: the best {len(good)} of the complete trials. Dotted: pruned ones, at their last value."
    yield Section("Parallel coordinates", [drawing("Parameters and metric", traces, layout)], note)


def _height(parameter: ParameterConfig, value: Any) -> float:
    """Return the position of a value on its axis, from 0 to 1."""
    if parameter.choices is not None:
        return parameter.choices.index(value) / max(1, len(parameter.choices) - 1)
    assert parameter.low is not None and parameter.high is not None, "a range has both ends"
    scale = math.log if parameter.log else float
    low, high = scale(parameter.low), scale(parameter.high)
    return 0.5 if high == low else (scale(value) - low) / (high - low)


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


# ---- trials -------------------------------------------------------------------------------------------------------------


def _trials(result: SearchResult) -> Section:
    header = ["trial", "", result.search.metric, *result.search.parameters, "step", f"{result.unit}-seconds", "recipe", "why"]
    rows = []
    for entry in result.trials:
        trial = entry.trial
        state = tag("span", trial.state, class_=CLASSES.get(trial.state))
        value = "" if trial.value is None else _number(trial.value)
        reason = f"pruned at step {trial.pruned_at}" if trial.state == "pruned" else trial.why
        recipe = tag("a", "recipe.yaml", href=f"runs/{trial.name}/recipe.yaml")
        values = [_number(trial.values[key]) for key in result.search.parameters]
        rows.append([_link(trial), state, value, *values, entry.step, f"{entry.cost:.0f}", recipe, reason])
    return Section("Trials", [table(header, rows)])
