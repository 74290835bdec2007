"""Check that the training data fill at least one step, if their number of records is known before the run.

The number is known for data files up to SCAN_BYTES, whose lines are counted, and for generated data sets. The job counts all
data, without the records that it drops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from launch.terminal.units import plural
from pipeline.config import GENERATED_DATASETS, DatasetConfig, Problem, Recipe, only_evaluates, section, training_sets, trains
from pipeline.data import epochs
from pipeline.recipe import user_files

SCAN_BYTES = 32 << 20
"""Largest file, in bytes, whose lines are counted; it takes tens of milliseconds. A larger file is likely to fill a step."""


def problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem if the training data fill no step.

    notes: receives the number of steps if the end of the data ends the run.
    """
    if not trains(recipe) or only_evaluates(recipe):
        return
    counts = [count(dataset) for dataset in training_sets(recipe.data).values()]
    if not counts or None in counts:
        return
    supply = epochs.of_records(recipe, sum(filter(None, counts)))
    if problem := supply.problem():
        yield problem
    elif supply.steps is not None and supply.steps < section(recipe).max_num_steps:
        rest_text = f"; the last {plural(supply.left_over, 'record')} fill no step and are not used" if supply.left_over else ""
        notes.append(f"data: {supply.source} make {plural(supply.steps, 'step')} of {supply.per_step} records{rest_text}")


def count(dataset: DatasetConfig) -> int | None:
    """Return the number of records that a run trains on in one epoch; None if it is not known."""
    generated = dataset.kwargs.get("size") if dataset.dataset_name in GENERATED_DATASETS else None
    records = _lines(Path(dataset.data_path)) if dataset.data_path else generated
    if not isinstance(records, int):
        return None
    records = min(records, dataset.max_samples or records)
    if size := dataset.split_validation_size:
        records -= math.ceil(size * records) if size < 1 else int(size)
    return max(0, records) * dataset.repeat


def _lines(path: Path) -> int | None:
    """Return the number of lines that are not blank; None for a large file, or one that another check refuses."""
    try:
        with user_files.open_file(path) as file:
            if user_files.other_format(file.read(8)) or path.stat().st_size > SCAN_BYTES:
                return None
        return user_files.count_lines(path)
    except (OSError, ValueError):
        return None
