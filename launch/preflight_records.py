"""What can be said against one record of a data file, before the job reads it with its tokenizer.

The job's own checks, which come to the same and go further, are in `pipeline/data/`: those need a tokenizer.
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.config import PAIRED, DatasetConfig, Recipe, RecipeError, generates


def check(recipe: Recipe, where: str, record: Any, dataset: DatasetConfig) -> str | None:
    """The prompt's text, if it is one. Raises RecipeError; `where` names recipe key, file and line."""
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: a {type(record).__name__}, not a JSON object")
    if recipe.algorithm in PAIRED:
        return _check_pair(recipe, where, record, dataset)
    if dataset.messages_key:
        _messages(where, record, dataset.messages_key)
        return None
    if not generates(recipe) or _is_judged_by_its_answer(recipe, dataset):
        _value(where, record, dataset.output_key)
    return _line(where, record, dataset.input_key)


def _is_judged_by_its_answer(recipe: Recipe, dataset: DatasetConfig) -> bool:
    environment = recipe.env.get(dataset.env_name)
    return environment is not None and environment.kind != "reward_model"


def _check_pair(recipe: Recipe, where: str, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    keys = (dataset.chosen_key, dataset.rejected_key)
    answers = [_value(where, record, key) for key in keys]
    if dataset.margin_key:
        margin = _value(where, record, dataset.margin_key)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise RecipeError(f"{where}: '{dataset.margin_key}' is {margin!r}, not a number")
    if isinstance(answers[0], list) != isinstance(answers[1], list):
        raise RecipeError(f"{where}: of '{keys[0]}' and '{keys[1]}' one is a list of messages and the other is not")
    if isinstance(answers[0], list):
        begins_with_the_prompt = _check_conversations(recipe, where, record, keys)
    else:
        begins_with_the_prompt = False
        for key in keys:
            if not _line(where, record, key).strip():
                raise RecipeError(f"{where}: '{key}' is empty")
    if answers[0] == answers[1]:
        raise RecipeError(f"{where}: '{keys[0]}' and '{keys[1]}' are the same: nothing is preferred")
    if begins_with_the_prompt:
        return None
    if not dataset.messages_key:
        return _line(where, record, dataset.input_key)
    if _messages(where, record, dataset.messages_key)[-1]["role"] == "assistant":
        raise RecipeError(f"{where}: '{dataset.messages_key}' must end where the assistant is to answer")
    return None


def _check_conversations(recipe: Recipe, where: str, record: dict[str, Any], keys: tuple[str, str]) -> bool:
    """Whether the prompt is in them."""
    if not recipe.data.apply_chat_template:
        raise RecipeError(f"{where}: '{keys[0]}' is a list of messages, and data.apply_chat_template is false")
    for key in keys:
        last = _messages(where, record, key)[-1]
        if last["role"] != "assistant" or not last["content"].strip():
            raise RecipeError(f"{where}: '{key}' does not end in an answer of the assistant's")
    return record[keys[0]][0]["role"] != "assistant"


def _messages(where: str, record: dict[str, Any], key: str) -> list[dict[str, str]]:
    messages = _value(where, record, key)
    well_formed = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not well_formed or not messages:
        raise RecipeError(f"{where}: '{key}' is not a list of {{role, content}} with texts in them")
    return messages


def _line(where: str, record: dict[str, Any], key: str) -> str:
    value = _value(where, record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RecipeError(f"{where}: '{key}' is a {type(value).__name__}, not a text or a number")
    return str(value)


def _value(where: str, record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise RecipeError(f"{where}: no key '{key}'; there are: {', '.join(record) or 'none'}")
    return record[key]
