"""From the recipe's `data` to what a step takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.config import Recipe, generates
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records
from pipeline.data.stream import ExampleStream, PromptStream
from pipeline.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_streams(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptStream, list[Prompt]] | tuple[ExampleStream, list[Sample]]:
    """The training stream, and the validation items: the first `max_val_samples` records of data.validation, in their order."""
    kind, section = (PromptStream, recipe.grpo) if generates(recipe) else (ExampleStream, recipe.sft)
    data = recipe.data

    def stream(dataset, shuffle, epochs):
        encoder = Encoder(tokenizer, recipe.policy.tokenizer, data, dataset)
        records = load_records(dataset, section.seed)
        made = kind(records, encoder, seed=section.seed, shuffle=shuffle, max_num_epochs=epochs)
        if made.dropped_at_start:
            print(f"data: {made.dropped_at_start} of {len(records)} records are too long and are passed over", flush=True)
        return made

    train = stream(data.train, data.shuffle, section.max_num_epochs)
    validation = stream(data.validation, False, 1).take(section.max_val_samples) if data.validation else []
    return train, validation
