"""From the recipe's `data` to what a step takes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pipeline.config import OFFLINE, PAIRED, DatasetConfig, Recipe, section
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records
from pipeline.data.preferences import Pair
from pipeline.data.stream import ExampleStream, PairStream, PromptStream
from pipeline.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Streams = tuple[PromptStream, list[Prompt]] | tuple[ExampleStream, list[Sample]] | tuple[PairStream, list[Pair]]


def build_streams(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Streams:
    """The training stream, and the validation items: the first `max_val_samples` records of data.validation, in their order.

    Prompts for algorithms that sample, pairs for those that learn preferences, else examples.
    """
    config, data = section(recipe), recipe.data

    def stream(dataset: DatasetConfig, shuffle: bool, epochs: int) -> PromptStream | ExampleStream | PairStream:
        if recipe.algorithm in PAIRED:
            kind = PairStream
        elif recipe.algorithm in OFFLINE:
            kind = ExampleStream
        else:
            kind = functools.partial(PromptStream, answered=_is_judged_by_its_answer(recipe, dataset))
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, data, dataset)
        records = load_records(dataset, config.seed)
        made = kind(records, encoder, seed=config.seed, shuffle=shuffle, max_num_epochs=epochs)
        if made.dropped_at_start:
            print(
                f"data: {made.dropped_at_start} of {len(records)} records are too long or no good, and are passed over",
                flush=True,
            )
        return made

    train = stream(data.train, data.shuffle, config.max_num_epochs)
    validation = stream(data.validation, False, 1).take(config.max_val_samples) if data.validation else []
    return train, validation


def _is_judged_by_its_answer(recipe: Recipe, dataset: DatasetConfig) -> bool:
    """A reward model needs no expected answer, and where there is no environment nothing is judged."""
    return dataset.env_name is not None and recipe.env[dataset.env_name].kind != "reward_model"
