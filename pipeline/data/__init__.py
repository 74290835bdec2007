"""From the recipe's `data` to what a step takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import (
    NAMED_DATASETS,
    OFFLINE,
    PAIRED,
    DatasetConfig,
    Recipe,
    held_out_sets,
    judged_by_answer,
    keyed_sets,
    own_kind,
    recognized,
    section,
    training_sets,
    validation_sets,
)
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records, load_split
from pipeline.data.mixture import Mixture
from pipeline.data.named import columns
from pipeline.data.preferences import Pair
from pipeline.data.stream import ExampleStream, PairStream, PromptStream, Stream
from pipeline.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Streams = tuple[Stream | Mixture, list[Prompt] | list[Sample] | list[Pair]]


def build_streams(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Streams:
    """The training stream, and the validation items: of each data set for it the first `max_val_samples` records, in their
    order. These are what training data sets hold out (`split_validation_size`), then data.validation or data.validations.

    Prompts for algorithms that sample, pairs for those that learn preferences, else examples. A prompt has the name of its data
    set, if there are several to train on, or to validate on.
    """
    config, data = section(recipe), recipe.data
    parts = {name: load_split(dataset, config.seed) for name, dataset in training_sets(data).items()}
    held_out = [rest for _, rest in parts.values() if len(rest)]
    streams, weights = {}, {}
    for name, dataset in training_sets(data).items():
        records, _ = parts[name]
        told = name if data.datasets else ""
        streams[name] = _stream(recipe, tokenizer, told, dataset, records, data.shuffle, config.max_num_epochs)
        weights[name] = float(len(records)) if dataset.weight is None else dataset.weight
    train = Mixture(streams, weights, config.seed) if len(streams) > 1 else next(iter(streams.values()))
    validated = [(name, dataset, rest) for (name, dataset), rest in zip(held_out_sets(data).items(), held_out, strict=True)]
    validated += [(name, dataset, load_records(dataset, config.seed)) for name, dataset in validation_sets(data).items()]
    validation: list[Any] = []
    for name, dataset, records in validated:
        told = name if len(validated) > 1 else ""
        for item in _stream(recipe, tokenizer, told, dataset, records, False, 1).take(config.max_val_samples):
            validation.append(dataclasses.replace(item, index=len(validation)) if isinstance(item, Prompt) else item)
    return train, validation


def _stream(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    dataset: DatasetConfig,
    records: Sequence[dict[str, Any]],
    shuffle: bool,
    epochs: int,
) -> Stream:
    """Of one data set. name: to be told with its prompts."""
    paired = recipe.algorithm in PAIRED
    key = next(key for key, one in keyed_sets(recipe.data).items() if one is dataset)
    if paired:
        kind = PairStream
    elif recipe.algorithm in OFFLINE:
        kind = ExampleStream
    else:
        kind = functools.partial(
            PromptStream,
            max_length=recipe.policy.max_total_sequence_length,
            answered=judged_by_answer(recipe, dataset),
            whole=own_kind(recipe.env, dataset.env_name),
            dataset=name,
        )
    dataset = columns(dataset, paired)
    if dataset.dataset_name not in NAMED_DATASETS:
        found = recognized(recipe, key, dataset, records)
        dataset = found.dataset
        if found.told:
            print(f"{key}: {found.told}", flush=True)
    encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, dataset)
    made = kind(records, encoder, seed=section(recipe).seed, shuffle=shuffle, max_num_epochs=epochs)
    if made.dropped_at_start:
        of = f" of {name}" if name else ""
        print(
            f"data: {made.dropped_at_start} of {len(records)} records{of} are too long or no good, and are passed over",
            flush=True,
        )
    return made
