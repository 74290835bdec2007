"""From the recipe's `data` to what a step takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import OFFLINE, PAIRED, DatasetConfig, Recipe, section
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records, load_split
from pipeline.data.named import columns
from pipeline.data.preferences import Pair
from pipeline.data.stream import ExampleStream, PairStream, PromptStream
from pipeline.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Streams = tuple[PromptStream, list[Prompt]] | tuple[ExampleStream, list[Sample]] | tuple[PairStream, list[Pair]]


def build_streams(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Streams:
    """The training stream, and the validation items: the first `max_val_samples` records, in their order, of data.validation or
    of what data.train.split_validation_size holds out.

    Prompts for algorithms that sample, pairs for those that learn preferences, else examples.
    """
    config, data = section(recipe), recipe.data

    def stream(
        dataset: DatasetConfig, records: Sequence[dict[str, Any]], shuffle: bool, epochs: int
    ) -> PromptStream | ExampleStream | PairStream:
        if recipe.algorithm in PAIRED:
            kind = PairStream
        elif recipe.algorithm in OFFLINE:
            kind = ExampleStream
        else:
            kind = functools.partial(PromptStream, answered=_is_judged_by_its_answer(recipe, dataset))
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, data, columns(dataset, recipe.algorithm in PAIRED))
        made = kind(records, encoder, seed=config.seed, shuffle=shuffle, max_num_epochs=epochs)
        if made.dropped_at_start:
            print(
                f"data: {made.dropped_at_start} of {len(records)} records are too long or no good, and are passed over",
                flush=True,
            )
        return made

    records, held_out = load_split(data.train, config.seed)
    train = stream(data.train, records, data.shuffle, config.max_num_epochs)
    validated = data.validation or data.train
    if data.validation:
        held_out = load_records(data.validation, config.seed)
    validation = stream(validated, held_out, False, 1).take(config.max_val_samples) if len(held_out) else []
    return train, validation


def _is_judged_by_its_answer(recipe: Recipe, dataset: DatasetConfig) -> bool:
    """A reward model needs no expected answer, and where there is no environment nothing is judged."""
    return dataset.env_name is not None and recipe.env[dataset.env_name].kind != "reward_model"
