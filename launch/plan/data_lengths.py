"""Measure the lengths of the recipe's data, if this machine has the tokenizer and records in JSONL, Parquet or the hub's cache.

The first records of each data set are encoded as the job encodes them. A step's estimated time uses their mean length. A step's
memory depends on the longest sequence, which is known only if every record was encoded: for small JSONL files. Records that are
longer than data.max_input_seq_length do not count, since the job drops or refuses them. Generated data and your own callables
are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.preflight import bounded, data_files, model_readings, record_counts
from launch.preflight.data_files import SCAN_BYTES, FirstRecords
from launch.preflight.model_readings import ModelReading
from pipeline import config
from pipeline.config import PAIRED, DatasetConfig, Recipe, RecipeError, generates
from pipeline.data import named
from pipeline.data.chat import Encoder
from pipeline.data.columns import recognize_columns

MOST_RECORDS = 1000  # of a data set
MOST_CHARACTERS = 2 << 20  # of their JSON: about a second of encoding


@dataclass(frozen=True, slots=True)
class DataLengths:
    """Lengths of the recipe's data, in tokens."""

    mean: float  # of prompts; for an offline algorithm of whole sequences. Of training data, by their weights
    longest: int | None  # sequence of all data; None if some records were not read, or if the algorithm samples
    source: str  # for the report


@dataclass(frozen=True, slots=True)
class _Read:
    """The lengths of the records that were read from one data set, in tokens."""

    lengths: Sequence[int]
    complete: bool  # whether these are all of its records


def measure(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> DataLengths | None:
    """Return the lengths of the recipe's data; None if a training data set cannot be read here."""
    if not config.trains(recipe):
        return None
    try:
        reading = model_readings.read("policy", recipe.policy, pending)
        if reading is None or (reading.problems and recipe.data.apply_chat_template):
            return None
        sets = config.keyed_sets(recipe.data)
        trained = len(config.training_sets(recipe.data))
        readings = []
        for number, (key, dataset) in enumerate(sets.items()):
            set_lengths = _read(recipe, key, dataset, reading)
            if set_lengths is None and number < trained:
                return None
            readings.append(set_lengths)
    except (RecipeError, ValueError, bounded.Unbounded):  # the checks of the recipe report it
        return None
    of_training = [(dataset, sample) for dataset, sample in zip([*sets.values()][:trained], readings, strict=False) if sample]
    weights = [dataset.weight or record_counts.count(dataset) or len(sample.lengths) for dataset, sample in of_training]
    means = [sum(sample.lengths) / len(sample.lengths) for _, sample in of_training]
    mean = sum(weight * set_mean for weight, set_mean in zip(weights, means, strict=True)) / sum(weights)
    complete = not generates(recipe) and all(sample and sample.complete for sample in readings)
    longest = max(length for sample in readings if sample for length in sample.lengths) if complete else None
    count = sum(len(sample.lengths) for _, sample in of_training)
    records_text = "all records" if all(sample.complete for _, sample in of_training) else f"the first {count:,} records"
    return DataLengths(mean, longest, f"the mean of {records_text} of {', '.join([*sets][:trained])}")


def _read(recipe: Recipe, key: str, dataset: DatasetConfig, reading: ModelReading) -> _Read | None:
    """Return the lengths of a data set's first records, encoded as the job does; None if this machine has no such records."""
    records = data_files.first_records(key, dataset, [], MOST_RECORDS, recipe.data.bad_records == "drop")
    if records is None:
        records, dataset = (
            data_files.first_cached(key, dataset, MOST_RECORDS),
            named.columns(dataset, recipe.algorithm in PAIRED),
        )
    if records is None or not records.numbered:
        return None
    rows = _bound_rows([record for _, record in records.numbered])
    if dataset.dataset_name not in config.NAMED_DATASETS:
        dataset = recognize_columns(recipe, key, dataset, rows).dataset

    def work() -> list[list[int]]:
        tokenizer: Any = reading.tokenizer  # has what Encoder uses of transformers' class
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, dataset)
        return [_lengths(recipe, encoder, row) for row in rows]

    limit, of_rows = recipe.data.max_input_seq_length, bounded.call(work)
    lengths = [length for row_lengths in of_rows for length in row_lengths if length <= limit]
    complete = len(rows) == len(records.numbered) and all(of_rows) and not records.bad and _is_whole(dataset, records)
    return _Read(lengths, complete) if lengths else None


def _lengths(recipe: Recipe, encoder: Encoder, row: dict[str, Any]) -> list[int]:
    """Return the lengths in tokens of one record; an empty list if it cannot be encoded here.

    An algorithm that samples has the length of the prompt, preference data have the lengths of both sequences, and all other
    data have the length of the sequence.
    """
    try:
        if generates(recipe):
            return [len(encoder.prompt(row))]
        if recipe.algorithm in PAIRED:
            return [encoder.count(example) for example in encoder.pair(row)]
        return [encoder.count(encoder.example(row))]
    except Exception:  # a template may raise anything; the job may drop, refuse or read the record
        return []


def _bound_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the longest beginning of the list that has at most MOST_CHARACTERS characters of JSON, but at least one record."""
    characters_left, rows_read = MOST_CHARACTERS, []
    for row in rows:
        characters_left -= len(json.dumps(row, default=str))
        if characters_left < 0 and rows_read:
            break
        rows_read.append(row)
    return rows_read


def _is_whole(dataset: DatasetConfig, records: FirstRecords) -> bool:
    """Return whether `records` are all records of a JSONL file."""
    if dataset.data_path is None or records.path.stat().st_size > SCAN_BYTES:
        return False
    return record_counts.count(replace(dataset, max_samples=None, split_validation_size=0, repeat=1)) == len(records.numbered)
