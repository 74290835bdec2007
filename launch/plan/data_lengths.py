"""Measure the mean length of the recipe's data, if this machine has its tokenizer and records.

Records are read from data files or the hub's cache.

The first records of each training data set are encoded as the job encodes them. Records that are longer than
data.max_input_seq_length do not count, since the job drops or refuses them. Generated data and your own callables are not read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from launch.preflight import bounded, data_files, model_readings
from launch.preflight.model_readings import ModelReading
from pipeline import config
from pipeline.config import LABELED, PAIRED, DatasetConfig, Recipe, RecipeError, generates, prompt_tools
from pipeline.data import named
from pipeline.data.chat import Encoder
from pipeline.data.columns import recognize_columns

MOST_RECORDS, MOST_TOKENS = 1000, 500_000  # of a data set: about a second of encoding


def measure(recipe: Recipe, pending: Sequence[os.PathLike] = ()) -> tuple[float, str] | None:
    """Return (mean tokens of the training data, its source for the report); None if a data set cannot be read here.

    The mean is that of prompts, or for an offline algorithm of whole sequences. Data sets count by their weights.
    """
    if not config.trains(recipe):
        return None
    keyed = config.keyed_sets(recipe.data)  # the training sets first
    sets = dict([*keyed.items()][: len(config.training_sets(recipe.data))])
    try:
        reading = model_readings.read("policy", recipe.policy, pending)
        if reading is None or (reading.problems and recipe.data.apply_chat_template):
            return None
        lengths = [_lengths_of(recipe, key, dataset, reading) for key, dataset in sets.items()]
    except (RecipeError, ValueError, bounded.Unbounded):  # the checks of the recipe report it
        return None
    if not all(lengths):
        return None
    weights = [s.weight or data_files.count(s) or len(of) for s, of in zip(sets.values(), lengths, strict=True)]
    count = sum(map(len, lengths))
    return fmean(map(fmean, lengths), weights), f"the mean of the first {count:,} records of {', '.join(sets)}"


def _lengths_of(recipe: Recipe, key: str, dataset: DatasetConfig, reading: ModelReading) -> list[int]:
    """Return the lengths in tokens of a data set's first records; [] if this machine has no such records.

    A processor changes records, and a plan runs no code of the user, so they are not read then.
    """
    if dataset.processor:
        return []
    records = data_files.first_records(key, dataset, [], MOST_RECORDS, recipe.data.bad_records == "drop")
    if records is None:
        records = data_files.first_cached(key, dataset, MOST_RECORDS)
        dataset = named.columns(dataset, recipe.algorithm in (*PAIRED, *LABELED))
    if records is None or not records.numbered:
        return []
    rows = [record for _, record in records.numbered]
    if dataset.dataset_name not in config.NAMED_DATASETS:
        dataset = recognize_columns(recipe, key, dataset, rows).dataset

    def work() -> list[int]:
        tokenizer: Any = reading.tokenizer  # has what Encoder uses of transformers' class
        tools = prompt_tools(recipe.env, dataset.env_name) if generates(recipe) else ()
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, dataset, tools)
        lengths: list[int] = []
        for row in rows:
            lengths += (length for length in _lengths(recipe, encoder, row) if length <= recipe.data.max_input_seq_length)
            if sum(lengths) > MOST_TOKENS:
                break
        return lengths

    return bounded.call(work)


def _lengths(recipe: Recipe, encoder: Encoder, row: dict[str, Any]) -> list[int]:
    """Return the lengths in tokens of one record: of its prompt, of a pair's two sequences, or of its sequence.

    Return an empty list if it cannot be encoded here.
    """
    try:
        if generates(recipe):
            return [len(encoder.prompt(row))]
        return [encoder.count(example) for example in encoder.learned(recipe.algorithm, row)]
    except Exception:  # a template may raise anything; the job may drop, refuse or read the record
        return []
