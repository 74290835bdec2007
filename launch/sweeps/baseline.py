"""The numbers of an earlier sweep that passed, which bands and speeds are judged by: a YAML file for Git.

Per run and gate the value of every seed; per metric of a gate the band of its curves over the seeds, for the report. Sorted,
one number a line, with where it comes from: commit, date, seeds, hardware. Written by `update_baseline=true`, not by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch.sweeps.expressions import Curve
from launch.sweeps.measurements import mean_and_spread
from pipeline.config import config_tree, refuse, schema_validation
from pipeline.storage import write_durably
from pipeline.values import Bool, Float, Int, Text

HEADER = "# Written by `python launch/sweep.py ... update_baseline=true`. Bands and speeds of the sweep are judged by it.\n"
POINTS = 40
"""Most points of a stored curve."""


@dataclass
class Provenance:
    sweep: Text = schema_validation.MISSING  # the suite's name and the sweep's id
    date: Text = schema_validation.MISSING
    commit: Text | None = None  # of the code that ran; null: not a Git checkout
    dirty: Bool = False  # it was changed since that commit


@dataclass
class StoredGate:
    """A gate's values. The expression is kept because a value of another expression is nothing to compare with."""

    value: Text = schema_validation.MISSING
    relative_to: Text | None = None
    seeds: dict[str, Float] = field(default_factory=dict)


@dataclass
class StoredCurve:
    """Over the seeds: mean and standard deviation at each step."""

    steps: list[Int] = field(default_factory=list)
    mean: list[Float] = field(default_factory=list)
    spread: list[Float] = field(default_factory=list)


@dataclass
class StoredRun:
    hardware: Text | None = None  # null: the runs did not say
    overrides: list[Text] = field(default_factory=list)  # that the recipe ran with, for who wonders what changed
    gates: dict[str, StoredGate] = field(default_factory=dict)
    curves: dict[str, StoredCurve] = field(default_factory=dict)


@dataclass
class Baseline:
    provenance: Provenance = field(default_factory=Provenance)
    runs: dict[str, StoredRun] = field(default_factory=dict)

    def of(self, run: str) -> StoredRun:
        return self.runs.get(run, StoredRun())


def read(path: Path) -> Baseline | None:
    """Return the baseline, None if there is none yet. Raises RecipeError for a file that is no baseline."""
    if not path.exists():
        return None
    tree = config_tree.load_with_parents(path)
    found, wrong = schema_validation.validate_tree(Baseline, schema_validation.with_defaults(Baseline, tree))
    refuse(problem.within(f"baseline {path}") for problem in [*schema_validation.unknown_keys(Baseline, tree), *wrong])
    return found


def write(baseline: Baseline, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, HEADER + config_tree.dump_yaml(_sorted(asdict(baseline))))


def stored_curve(seeds: Iterable[Curve]) -> StoredCurve:
    """Return the seeds' mean and spread, thinned to POINTS."""
    mean, width = mean_and_spread(seeds)
    steps = [*mean]
    count = min(POINTS, len(steps))
    kept = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    return StoredCurve(kept, [_short(mean[step]) for step in kept], [_short(width[step]) for step in kept])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _sorted(value: object) -> object:
    """Return the value with its keys in order; seeds by number."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=lambda key: (int(key) if key.isdigit() else -1, key))}
    return value
