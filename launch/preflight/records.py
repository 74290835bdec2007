"""What can be said against one record of a data file, before the job reads it with its tokenizer.

The job's own checks, which come to the same and go further, are in `pipeline/data/`: those need a tokenizer.
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.config import PAIRED, DatasetConfig, Recipe, RecipeError, generates


def prompt(recipe: Recipe, record: Any, dataset: DatasetConfig) -> str | None:
    """The prompt's text, if it is one. Raises RecipeError with the first thing that is wrong."""
    if not isinstance(record, dict):
        raise RecipeError(f"a {type(record).__name__}, not a JSON object")
    if recipe.algorithm in PAIRED:
        return _check_pair(recipe, record, dataset)
    if dataset.messages_key:
        _messages(record, dataset.messages_key)
        return None
    if not generates(recipe) or _is_judged_by_its_answer(recipe, dataset):
        _value(record, dataset.output_key)
    return _line(record, dataset.input_key)


def _is_judged_by_its_answer(recipe: Recipe, dataset: DatasetConfig) -> bool:
    environment = recipe.env.get(dataset.env_name)
    return environment is not None and environment.kind != "reward_model"


def _check_pair(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    keys = (dataset.chosen_key, dataset.rejected_key)
    answers = [_value(record, key) for key in keys]
    if dataset.margin_key:
        margin = _value(record, dataset.margin_key)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise RecipeError(f"'{dataset.margin_key}' is {margin!r}, not a number")
    if isinstance(answers[0], list) != isinstance(answers[1], list):
        raise RecipeError(f"of '{keys[0]}' and '{keys[1]}' one is a list of messages and the other is not")
    if isinstance(answers[0], list):
        begins_with_the_prompt = _check_conversations(recipe, record, keys)
    else:
        begins_with_the_prompt = False
        for key in keys:
            if not _line(record, key).strip():
                raise RecipeError(f"'{key}' is empty")
    if answers[0] == answers[1]:
        raise RecipeError(f"'{keys[0]}' and '{keys[1]}' are the same: nothing is preferred")
    if begins_with_the_prompt:
        return None
    if not dataset.messages_key:
        return _line(record, dataset.input_key)
    if _messages(record, dataset.messages_key)[-1]["role"] == "assistant":
        raise RecipeError(f"'{dataset.messages_key}' must end where the assistant is to answer")
    return None


def _check_conversations(recipe: Recipe, record: dict[str, Any], keys: tuple[str, str]) -> bool:
    """Whether the prompt is in them."""
    if not recipe.data.apply_chat_template:
        raise RecipeError(f"'{keys[0]}' is a list of messages, and data.apply_chat_template is false")
    for key in keys:
        last = _messages(record, key)[-1]
        if last["role"] != "assistant" or not last["content"].strip():
            raise RecipeError(f"'{key}' does not end in an answer of the assistant's")
    return record[keys[0]][0]["role"] != "assistant"


def _messages(record: dict[str, Any], key: str) -> list[dict[str, str]]:
    messages = _value(record, key)
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not well_formed or not messages:
        raise RecipeError(f"'{key}' is not a list of {{role, content}} with texts in them")
    return messages


def _line(record: dict[str, Any], key: str) -> str:
    value = _value(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RecipeError(f"'{key}' is a {type(value).__name__}, not a text or a number")
    return str(value)


def _value(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise RecipeError(f"no key '{key}'; there are: {', '.join(record) or 'none'}")
    return record[key]
