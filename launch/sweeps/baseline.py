"""Read and write a baseline: the numbers of a sweep that passed, as YAML for Git. Bands and speeds compare with them.

A baseline holds, for each run, the value of each gate with each seed and, for the report, the mean curve over the seeds of each
metric that a gate reads. Keys are sorted, with one number a line. The provenance is recorded: commit, date, seeds, hardware.
`update_baseline=true` writes a baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch.sweeps.expressions import Curve, by_step
from pipeline.config import config_tree, refuse, schema_validation, yaml_text
from pipeline.files.storage import write_durably
from pipeline.recipe.values import Bool, Float, Int, Text

HEADER = "# Written by `python launch/sweep.py ... update_baseline=true`. Bands and speeds of the sweep compare with it.\n"
MAX_POINTS = 40
"""Maximum number of points of a stored curve."""


@dataclass
class Provenance:
    """The sweep and the code that a baseline comes from."""

    sweep: Text = schema_validation.MISSING  # the suite's name and the sweep's id
    date: Text = schema_validation.MISSING
    commit: Text | None = None  # of the code that ran; null if it was no Git checkout
    dirty: Bool = False  # whether the code had changes


@dataclass
class StoredGate:
    """Holds a gate's value with each seed, and its expression, because values of different expressions cannot be compared."""

    value: Text = schema_validation.MISSING
    relative_to: Text | None = None
    seeds: dict[str, Float] = field(default_factory=dict)
    questions: dict[str, list[Float]] = field(default_factory=dict)  # of a paired gate: values by a hash of the question


@dataclass
class StoredCurve:
    """Holds the mean and the standard deviation over the seeds at each step."""

    steps: list[Int] = field(default_factory=list)
    mean: list[Float] = field(default_factory=list)
    spread: list[Float] = field(default_factory=list)


@dataclass
class StoredRun:
    """The gates and curves of one run."""

    hardware: Text | None = None  # null if the runs did not record it
    overrides: list[Text] = field(default_factory=list)  # of the recipe, to find later changes
    gates: dict[str, StoredGate] = field(default_factory=dict)
    curves: dict[str, StoredCurve] = field(default_factory=dict)


@dataclass
class Baseline:
    """Holds the numbers of each run of a sweep that passed."""

    provenance: Provenance = field(default_factory=Provenance)
    runs: dict[str, StoredRun] = field(default_factory=dict)

    def of(self, run: str) -> StoredRun:
        """Return a run's numbers; an empty StoredRun if the baseline lacks the run."""
        return self.runs.get(run, StoredRun())


def read(path: Path) -> Baseline | None:
    """Return the baseline in a file; None if the file does not exist yet. Raises RecipeError for an invalid file."""
    if not path.exists():
        return None
    tree = config_tree.load_with_parents(path)
    baseline, wrong = schema_validation.validate_tree(Baseline, schema_validation.with_defaults(Baseline, tree))
    refuse(problem.within(f"baseline {path}") for problem in [*schema_validation.unknown_keys(Baseline, tree), *wrong])
    return baseline


def write(baseline: Baseline, path: Path) -> None:
    """Write a baseline, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, HEADER + yaml_text.dump(_sort(asdict(baseline))))


def stored_curve(seeds: Iterable[Curve]) -> StoredCurve:
    """Return the mean and the standard deviation of the seeds' curves, thinned to MAX_POINTS."""
    values = by_step(seeds)
    steps = [*values]
    count = min(MAX_POINTS, len(steps))
    points = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    mean, deviation = ([_short(reduce(values[step])) for step in points] for reduce in (statistics.fmean, spread))
    return StoredCurve(points, mean, deviation)


def spread(values: Iterable[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _sort(value: object) -> object:
    """Return the value with all keys sorted, at every level; keys that are seeds are sorted as numbers."""
    if isinstance(value, Mapping):
        return {key: _sort(value[key]) for key in sorted(value, key=lambda key: (int(key) if key.isdigit() else -1, key))}
    return value
