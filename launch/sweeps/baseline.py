"""Read and write a baseline: the numbers of a sweep that passed, with which bands and speeds compare, as YAML for Git.

It holds the value of every seed for each run and gate, and the mean curve over the seeds for each metric of a gate, for the
report. Keys are sorted, with one number a line, and the provenance is recorded: commit, date, seeds, hardware.
`update_baseline=true` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch.sweeps.expressions import Curve
from launch.sweeps.measurements import mean_and_spread
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
    """A gate's value of each seed, with its expression: values of different expressions cannot be compared."""

    value: Text = schema_validation.MISSING
    relative_to: Text | None = None
    seeds: dict[str, Float] = field(default_factory=dict)
    questions: dict[str, list[Float]] = field(default_factory=dict)  # of a paired gate: values by a hash of the question


@dataclass
class StoredCurve:
    """Mean and standard deviation over the seeds at each step."""

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
    """The numbers of a sweep that passed, by run."""

    provenance: Provenance = field(default_factory=Provenance)
    runs: dict[str, StoredRun] = field(default_factory=dict)

    def of(self, run: str) -> StoredRun:
        """Return a run's numbers; empty numbers if the baseline lacks the run."""
        return self.runs.get(run, StoredRun())


def read(path: Path) -> Baseline | None:
    """Return the baseline; None if there is no file yet. Raises RecipeError for an invalid file."""
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
    """Return the seeds' mean and spread, thinned to MAX_POINTS."""
    mean, width = mean_and_spread(seeds)
    steps = [*mean]
    count = min(MAX_POINTS, len(steps))
    points = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    return StoredCurve(points, [_short(mean[step]) for step in points], [_short(width[step]) for step in points])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _sort(value: object) -> object:
    """Return the value with sorted keys; seeds are sorted by number."""
    if isinstance(value, Mapping):
        return {key: _sort(value[key]) for key in sorted(value, key=lambda key: (int(key) if key.isdigit() else -1, key))}
    return value
