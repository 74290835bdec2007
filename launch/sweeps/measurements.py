"""Read the metrics of runs as curves, and their hardware, from the run folders."""

from __future__ import annotations

import fnmatch
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.runs import run_files
from launch.runs.attempts import all_attempts
from launch.sweeps.expressions import Curve
from pipeline.observe.metrics import NOT_REPRODUCIBLE, read


@dataclass(frozen=True)
class RunMeasurements:
    """Holds the metrics and the hardware of one run with one seed."""

    curves: Mapping[str, Curve]
    hardware: str | None  # such as "2 x (8 x NVIDIA H100 80GB HBM3)"; None if not recorded
    seconds: float = 0.0  # from the start of its first attempt to its last step
    folder: Path | None = None  # the run's

    def reproducible(self, patterns: list[str]) -> dict[str, Curve]:
        """Return the metrics that match any of `patterns` and that an equal run reproduces to the last bit.

        On GPUs a second run reproduces them only with policy.deterministic=true.
        """
        curves = {name: curve for name, curve in self.curves.items() if not name.startswith(NOT_REPRODUCIBLE)}
        return {name: curve for name, curve in curves.items() if any(fnmatch.fnmatchcase(name, glob) for glob in patterns)}


def measure(run_dir: Path) -> RunMeasurements:
    """Return the metrics and the hardware of a run. Raises RecipeError for a malformed metrics.jsonl."""
    lines = read(run_dir / "metrics.jsonl")
    attempts = all_attempts(run_dir)
    seconds = max(0.0, lines[-1]["time"] - attempts[0].started) if lines and attempts else 0.0
    return RunMeasurements(curves(lines), _hardware(run_dir), seconds, run_dir)


def curves(lines: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return metric -> its curve, over the steps that have the metric. lines: the records of metrics.jsonl."""
    points: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time"):
                steps, values = points.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(value)
    return {name: Curve(steps, values) for name, (steps, values) in points.items()}


def _hardware(run_dir: Path) -> str | None:
    """Return a text that counts the nodes of a run by kind; None if no attempt has a nodes.json. The newest one counts."""
    for attempt in reversed(all_attempts(run_dir)):
        if nodes := run_files.nodes(attempt.folder):
            return by_kind(nodes.values())
    return None


def by_kind(nodes: Any) -> str | None:
    """Return a text that counts the nodes of a nodes.json by kind; None if a node lists neither GPUs nor its processor."""
    kinds = []
    for node in nodes:
        gpus = Counter(gpu["name"] for gpu in node.get("gpus", ()))
        kind = ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())) or node.get("cpu")
        if kind is None:
            return None
        kinds.append(kind)
    return "; ".join(f"{count} x ({kind})" if count > 1 else kind for kind, count in sorted(Counter(kinds).items())) or None


# ---- over the seeds -----------------------------------------------------------------------------------------------------


def by_step(seeds: Iterable[Curve]) -> dict[int, list[float]]:
    """Return step -> the values of the seeds, steps ascending. A seed without a value at a step is left out there."""
    values_by_step: dict[int, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve.steps, curve.values, strict=True):
            if value is not None:
                values_by_step.setdefault(step, []).append(value)
    return dict(sorted(values_by_step.items()))


def mean_and_spread(seeds: Iterable[Curve]) -> tuple[dict[int, float], dict[int, float]]:
    """Return (step -> mean over the seeds, step -> standard deviation over the seeds)."""
    values_by_step = by_step(seeds)
    mean = {step: statistics.fmean(values) for step, values in values_by_step.items()}
    return mean, {step: spread(values) for step, values in values_by_step.items()}


def spread(values: Iterable[float]) -> float:
    """Return the sample standard deviation; 0 for a single value."""
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0
