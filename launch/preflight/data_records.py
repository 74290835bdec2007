"""Check one record of a data file as the job reads it, but without a tokenizer."""

from __future__ import annotations

from typing import Any

from pipeline.config import KINDS, PAIRED, DatasetConfig, Recipe, generates, judged_by_answer, kind_class, parse_conversation
from pipeline.data.records import RecordReader


def prompt(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    """Return the prompt's text, None if it is a conversation. Raises ValueError with the first error."""
    reader, key = RecordReader(recipe.data, dataset), dataset.text_key or dataset.input_key
    if recipe.algorithm in PAIRED:
        reader.pair(record)
        reader.margin(record)
        chosen = record[dataset.chosen_key]
        if isinstance(chosen, list) and parse_conversation(chosen, dataset.chosen_key)[0]["role"] != "assistant":
            return None  # the conversation contains the prompt
    elif generates(recipe):
        reader.question(record)
        if judged_by_answer(recipe, dataset):
            reader.answer(record)
    else:
        reader.example(record)
    text = None if dataset.messages_key and not dataset.text_key else record.get(key)
    return None if text is None or isinstance(text, list) else str(text)


def unfit_answer(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    """Return why the environment cannot judge by the expected answer of a valid record; None if it can."""
    environment = recipe.env.get(dataset.env_name) if generates(recipe) and dataset.env_name else None
    expected = record.get(dataset.output_key)
    if environment and environment.kind in KINDS and isinstance(expected, str | int | float):
        try:
            kind_class(environment.kind).check_answer(str(expected))
        except ValueError as error:
            return f"'{dataset.output_key}': env.{dataset.env_name} cannot judge by it: {error}"
    return None
