"""Collect the trials of a search, what their runs cost, and what pruning saved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.sweeps import measurements
from launch.sweeps.expressions import Curve
from launch.sweeps.search import space
from launch.sweeps.search.config import SearchConfig
from launch.sweeps.search.trial import Trial
from launch.sweeps.sweep_folder import SweepFolder
from pipeline import config
from pipeline.config import Recipe


@dataclass(frozen=True)
class TrialResult:
    """Holds a trial and the measurements of its run."""

    trial: Trial
    run_dir: Path
    curves: Mapping[str, Curve]
    seconds: float  # from the start of its first attempt to its last step
    devices: int  # GPUs of its job; ranks if it has no GPUs

    @property
    def step(self) -> int:
        """The last step of the run."""
        return max((curve.steps[-1] for curve in self.curves.values() if curve.steps), default=0)

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step; None before the first step."""
        curve = self.curves.get("time/step")
        values = [value for value in curve.values if value is not None] if curve else []
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class SearchResult:
    """Holds a search, and everything that its report shows."""

    title: str
    folder: Path
    search: SearchConfig
    planned: int  # number of trials when the search is complete
    trials: Sequence[TrialResult]
    importances: Mapping[str, float]  # shares, largest first; empty if they are not known
    max_steps: int | None
    unit: str  # GPU or rank

    @property
    def best(self) -> TrialResult | None:
        """The complete trial with the best value, of equal ones the earliest; None without a complete trial."""
        complete = [entry for entry in self.trials if entry.trial.state == "complete" and entry.trial.value is not None]
        sign = 1 if self.search.direction == "maximize" else -1
        return max(complete, key=lambda entry: sign * (entry.trial.value or 0.0), default=None)

    def count(self, state: str) -> int:
        """Return the number of trials in a state."""
        return sum(entry.trial.state == state for entry in self.trials)

    @property
    def used(self) -> float:
        """Device-seconds of all runs together."""
        return sum(entry.seconds * entry.devices for entry in self.trials)

    @property
    def saved(self) -> float:
        """Device-seconds that pruning saved: the steps that pruned trials did not run, times their median step time."""
        if self.max_steps is None:
            return 0.0
        pruned = [entry for entry in self.trials if entry.trial.state == "pruned"]
        return sum((self.max_steps - entry.step) * (entry.step_seconds or 0.0) * entry.devices for entry in pruned)

    @property
    def summary(self) -> str:
        """The result of the search in one line."""
        states = ", ".join(
            f"{count} {state}" for state in ("complete", "pruned", "failed", "running") if (count := self.count(state))
        )
        cost = f"{self.used:,.0f} {self.unit}-seconds"
        saved = f", pruning saved about {self.saved:,.0f}" if self.count("pruned") else ""
        return f"{self.title}: {len(self.trials)} of {self.planned} trials: {states or 'none'}; {cost}{saved}"


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
        measured = measurements.measure(run_dir)
        devices, unit = _devices(run_dir)
        units |= {unit} - {""}
        results.append(TrialResult(trial, run_dir, measured.curves, measured.seconds, devices))
    unit = units.pop() if len(units) == 1 else "device"
    return SearchResult(folder.title, folder.path, search, space.trials(search), results, importances, max_steps, unit)


def _devices(run_dir: Path) -> tuple[int, str]:
    """Return (GPUs of a run, "GPU"). Without GPUs, return (its ranks, "rank"); for a trial never submitted, (0, "")."""
    path = run_dir / "recipe.yaml"
    if not path.exists():
        return 0, ""
    recipe = config.read(path)
    gpus = _gpus(recipe)
    return (gpus, "GPU") if gpus else (sum(map(config.ranks, config.components(recipe).values())), "rank")


def _gpus(recipe: Recipe) -> int:
    """Return the GPUs of a job; colocated components count once."""
    guests = {"generate"} if config.colocated(recipe) else set()
    return sum(part.nodes * part.gpus_per_node for name, part in config.components(recipe).items() if name not in guests)
