"""Make charts of all keys in metrics.jsonl. A chart shows all runs.

Related keys share a chart: x and x_max; x_min and x_max as the edges of a band, and likewise x_p01 and x_p99; train/x as a line
and val/x as points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launch.pages.chart import POINTS, Chart, Mark, Series
from launch.runs.run_changes import text
from launch.runs.run_folder import OTHER_PHASES, STEP_PHASES, MetricColumns, RunFolder, phases

ROLES = {"mean": "mean", "p50": "median", "min": "min", "max": "max", "p01": "1%", "p99": "99%"}
BANDS = (("min", "max"), ("p01", "p99"))
KINDS = {"train": "training", "val": "validation"}
"""Prefixes that share charts -> their names in the charts."""
FIRST = ("reward", "selected_reward", "accuracy", "loss", "kl", "entropy", "grad_norm", "gen_logprob_error", "lr")
"""The order of charts, by the first of these words in the name. All others follow alphabetically."""
NOTES = {
    "gen_logprob_error": "difference per token between the generate ranks and the train ranks",
    "approx_entropy": "entropy of the sampled tokens, in nats",
    "selected_reward": "mean over the rollouts in the training batch",
    "grad_norm": "before clipping",
}
REFIT_PARTS = ("pack", "wire", "apply", "pause")
UNITS = {"bytes": "B", "gb_per_s": "GB/s", "tokens_per_s": "tokens/s"}
TOKENS_OF_AGE = r"async/tokens_age_\d+"
Layers = Mapping[str, tuple[Sequence[float], Sequence[float]]]
MOST_POINTS = 6000
"""Maximum number of points of all runs in one chart."""


@dataclass(frozen=True)
class LabelledRun:
    """A run with its label and its metrics."""

    run: RunFolder
    label: str  # unique among the runs of the page
    metrics: MetricColumns

    def restarts(self) -> list[tuple[float, str]]:
        """Return (step from which the run continued, reason) for each restart after which a step was completed."""
        restarts = []
        for before, attempt in zip(self.run.attempts, self.run.attempts[1:], strict=False):
            if (step := self.metrics.step_after(attempt.started)) is not None:
                restarts.append((max(0.0, step - 1), f"restart; {before.verdict or 'reason unknown'}"))
        return restarts

    def changes(self) -> list[tuple[float, str]]:
        """Return (step after which the change took effect, text) for each change of a key during the run."""
        return [(float(answer.step), text(change)) for answer in self.run.answers for change in answer.changes]


class Curves:
    """Makes the charts for the sections of a page. Each key is shown once: making its chart removes it from `remaining`."""

    def __init__(self, labelled: Sequence[LabelledRun]):
        self.labelled = labelled
        self.remaining = list(dict.fromkeys(key for labelled_run in labelled for key in labelled_run.metrics.columns))
        self.marks = [
            Mark(x, note, run)
            for run, labelled_run in enumerate(labelled)
            for x, note in (*labelled_run.restarts(), *labelled_run.changes())
        ]
        self.points = min(POINTS, max(200, MOST_POINTS // max(1, len(labelled))))

    def take(self, pattern: str) -> list[Chart]:
        """Return charts of the remaining keys that a regular expression matches from their beginning."""
        return self._charts(self.drop(pattern))

    def drop(self, pattern: str) -> list[str]:
        """Remove the keys that a regular expression matches from their beginning, and return them."""
        keys = [key for key in self.remaining if re.match(pattern, key)]
        self.remaining = [key for key in self.remaining if key not in keys]
        return keys

    def groups(self) -> list[str]:
        """Return the different prefixes of the remaining keys. All prefixes in KINDS count as "train"."""
        return list(dict.fromkeys("train" if (prefix := _prefix(key)) in KINDS else prefix for key in self.remaining))

    def _charts(self, keys: list[str]) -> list[Chart]:
        by_base: dict[tuple[str, str], list[str]] = {}
        for key in keys:
            prefix = _prefix(key)
            by_base.setdefault(("train" if prefix in KINDS else prefix, _base(key)), []).append(key)
        charts = [self._chart(base, keys) for (_, base), keys in by_base.items()]
        return sorted((chart for chart in charts if chart.series), key=_order)

    def _chart(self, base: str, keys: list[str]) -> Chart:
        alone = len(keys) == 1 and _role(keys[0])
        title = f"{base} {ROLES[alone]}" if alone else base
        series = [line for run in range(len(self.labelled)) for line in self._series(run, keys)]
        note = next((note for part, note in NOTES.items() if part in base), "")
        unit = next((unit for ending, unit in UNITS.items() if re.search(rf"(^|_){ending}(_|$)", base)), "")
        unit = "s" if _prefix(keys[0]) == "time" else unit
        return Chart(title.replace("_", " "), series, unit=unit, marks=self.marks, note=note, points=self.points)

    def _series(self, run: int, keys: list[str]) -> list[Series]:
        columns = self.labelled[run].metrics.columns
        of = {(_prefix(key), _role(key)): columns[key] for key in sorted(keys) if key in columns}
        series = []
        for prefix in dict.fromkeys(prefix for prefix, _ in of):
            for low, high in BANDS if prefix != "val" else ():
                if (prefix, low) in of and (prefix, high) in of:
                    (x, lows), (_, highs) = of.pop((prefix, low)), of.pop((prefix, high))
                    series.append(Series(f"{ROLES[low]} to {ROLES[high]}", x, (), run, "band", lows, highs))
        for (prefix, role), (x, y) in of.items():
            name = " ".join(filter(None, [KINDS.get(prefix, ""), ROLES.get(role, "")]))
            series.append(Series(name, x, y, run, "points" if prefix == "val" else "line"))
        return series

    # ---- where the time goes ------------------------------------------------------------------------------------------------

    def phase_times(self) -> list[Chart]:
        """Return a chart for each run, in which the seconds of the phases of a step are stacked."""
        self.drop(rf"time/({'|'.join(('step', *STEP_PHASES, *OTHER_PHASES))})$")
        return [
            self._stack(run, "seconds per step", phases(labelled_run.metrics)) for run, labelled_run in enumerate(self.labelled)
        ]

    def refit_times(self) -> list[Chart]:
        """Return a chart for each run, in which the seconds of the parts of a refit are stacked.

        The time of the digest is included in these parts, and has a separate chart.
        """
        stacks = []
        for run, labelled_run in enumerate(self.labelled):
            columns = labelled_run.metrics.columns
            layers = {part: columns[key] for part in REFIT_PARTS if (key := f"time/refit_{part}") in columns}
            stacks.append(self._stack(run, "seconds of a refit", layers))
        self.drop(rf"time/refit_({'|'.join(REFIT_PARTS)})$")
        return [chart for chart in stacks if chart.series]

    # ---- idle shares and the age of training tokens --------------------------------------------------------------------------

    def idle(self) -> list[Chart]:
        """Return a chart for each component ("realm") with its idle share."""
        note = "share of the ranks' seconds spent waiting; a rank inside a collective does not count as waiting"
        return [replace(chart, title=f"idle share, {chart.title}", note=note) for chart in self.take("idle/")]

    def ages(self) -> list[Chart]:
        """Return charts of the training tokens' age in steps, and for each run a chart of the share of tokens of each age."""
        stacks = []
        for run, labelled_run in enumerate(self.labelled):
            columns = labelled_run.metrics.columns
            of_age = {int(key.rpartition("_")[2]): columns[key] for key in columns if re.fullmatch(TOKENS_OF_AGE, key)}
            if of_age:
                stacks.append(self._stack(run, "share of tokens by age", _shares(dict(sorted(of_age.items()))), unit=""))
        self.drop(f"{TOKENS_OF_AGE}$")
        ages = [replace(chart, note="age of training tokens, in steps") for chart in self.take("async/age_")]
        return [*ages, *stacks]

    def _stack(self, run: int, title: str, layers: Layers, unit: str = "s") -> Chart:
        of = f" of {self.labelled[run].label}" if len(self.labelled) > 1 else ""
        series = [Series(name, x, y, run) for name, (x, y) in layers.items()]
        marks = [mark for mark in self.marks if mark.run == run]
        return Chart(title + of, series, unit=unit, stacked=True, marks=marks, points=self.points)


def _shares(counts: dict[int, tuple[Sequence[float], Sequence[float]]]) -> Layers:
    """Return layers "age N": the share of tokens of this age in each step, 0 if a step has none.

    counts: age -> (steps, numbers of tokens).
    """
    by_step = {age: dict(zip(*column, strict=True)) for age, column in counts.items()}
    steps = sorted({step for of in by_step.values() for step in of})
    totals = {step: sum(of.get(step, 0.0) for of in by_step.values()) or 1.0 for step in steps}
    return {f"age {age}": (steps, [of.get(step, 0.0) / totals[step] for step in steps]) for age, of in by_step.items()}


def _prefix(key: str) -> str:
    return key.partition("/")[0] if "/" in key else "other"


def _role(key: str) -> str:
    ending = key.rpartition("_")[2]
    return ending if ending in ROLES and "_" in key.rpartition("/")[2] else ""


def _base(key: str) -> str:
    name = key.partition("/")[2] if "/" in key else key
    return name.removesuffix(f"_{role}") if (role := _role(key)) else name


def _order(chart: Chart) -> tuple[int, str]:
    name = chart.title.replace(" ", "_")
    position = next((i for i, part in enumerate(FIRST) if re.search(rf"(^|_){part}(_|$)", name)), len(FIRST))
    return position, name
