"""Check that prompts in a data file are short enough, and that the tokenizer knows the text of prompts and answers.

The checks need the `tokenizers` package and tokenizer.json. The job checks all records again, with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from launch.preflight.data_files import FirstRecords
from launch.recipes.model_files import read_json
from pipeline.config import Problem, Recipe, generates, trains
from pipeline.data.file_tokenizer import read_tokenizer
from pipeline.recipe import user_files


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield notes on lengths in the recipe that are unusual but harmless."""
    most, context = recipe.policy.generation.max_new_tokens, recipe.policy.max_total_sequence_length
    if generates(recipe) and trains(recipe) and most > context:
        yield (
            f"policy.generation.max_new_tokens: {most} is above policy.max_total_sequence_length={context}, the limit of prompt"
            " and answer together; answers end at this limit"
        )


def problems(
    records: FirstRecords, texts: list[tuple[int, str]], tokenizer: Path, recipe: Recipe, kind: Literal["prompts", "answers"]
) -> Iterator[Problem]:
    """Yield problems of texts with characters that the tokenizer does not know, and of prompts that are too long.

    texts: (record number, text) pairs without the chat template, so the job counts at least as many tokens. tokenizer: the path
    of tokenizer.json.
    """
    encodings = read_tokenizer(tokenizer).encode_batch([text for _, text in texts], add_special_tokens=False)
    numbered = [(number, text, encoding) for (number, text), encoding in zip(texts, encodings, strict=True)]
    if recipe.data.overlong_prompts == "error" and kind == "prompts":
        yield from _too_long(records, max((len(encoding.ids), number) for number, _, encoding in numbered), recipe)
    if recipe.data.unknown_tokens == "error" and (mark := _unknown_token(tokenizer)):
        unknown_texts = []
        for number, text, encoding in numbered:
            parts = [
                text[begin:end] for token, (begin, end) in zip(encoding.tokens, encoding.offsets, strict=True) if token == mark
            ]
            unknown_texts += [(number, parts)] if parts else []
        if unknown_texts:
            number, parts = min(unknown_texts)
            words = ", ".join(dict.fromkeys(map(repr, parts[:5])))
            source = f"{records.location(number)}: the tokenizer in {tokenizer.parent}"
            share = f"{len(unknown_texts)} of the {len(numbered)} {kind} checked"
            message = f"does not know {words}, which becomes {mark} (in {share})"
            hint = "Try another policy.tokenizer.name, or data.unknown_tokens=keep or drop"
            yield Problem(records.key, "bad-record", f"{source} {message}. {hint}")


def _too_long(records: FirstRecords, longest: tuple[int, int], recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if the longest prompt is too long. longest: (number of tokens, record number)."""
    length, number = longest
    if length > (limit := recipe.data.max_input_seq_length):
        message = f", but data.max_input_seq_length is {limit}"
    elif generates(recipe) and length >= (limit := recipe.policy.max_total_sequence_length):
        message = f" leaves no room for an answer in policy.max_total_sequence_length {limit}"
    else:
        return
    hint = "Try a shorter prompt, a higher limit, or data.overlong_prompts=drop"
    yield Problem(records.key, "too-large", f"{records.location(number)}: a prompt of {length} tokens{message}. {hint}")


def _unknown_token(tokenizer: Path) -> str | None:
    """Return the token for unknown text; None if there is none, or if it is also the BOS or EOS token, as in GPT-2."""
    model = read_json(tokenizer, user_files.MAX_JSON)["model"]
    mark = model.get("unk_token")
    if mark is None and model.get("unk_id") is not None:
        mark = model["vocab"][model["unk_id"]][0]
    settings = tokenizer.with_name("tokenizer_config.json")
    configuration = read_json(settings) if settings.exists() else {}
    special = [configuration.get(name) for name in ("bos_token", "eos_token")]
    return None if mark in [token.get("content") if isinstance(token, dict) else token for token in special] else mark
