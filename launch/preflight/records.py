"""Check one record of a data file, before the job reads it with its tokenizer.

The job's own checks, which come to the same and go further, are in `pipeline/data/`: those need a tokenizer.
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.config import (
    KINDS,
    PAIRED,
    DatasetConfig,
    Recipe,
    conversation,
    generates,
    judged_by_answer,
    kind_class,
)


def prompt(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    """Return the prompt's text, if it is one. Raises ValueError with the first thing that is wrong."""
    if recipe.algorithm in PAIRED:
        return _check_pair(recipe, record, dataset)
    if dataset.text_key:
        text = _line(record, dataset.text_key)
        if not text.strip():
            raise ValueError(f"'{dataset.text_key}' is empty")
        return text
    if dataset.messages_key:
        _check_messages(recipe, record, dataset)
        return None
    if not generates(recipe) or judged_by_answer(recipe, dataset):
        _check_answer(recipe, record, dataset.output_key)
    return _asked(recipe, record, dataset.input_key)


def unfit_answer(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    """Return why the environment of a record, which has no other faults, cannot judge by its expected answer."""
    environment = recipe.env.get(dataset.env_name) if generates(recipe) and dataset.env_name else None
    expected = record.get(dataset.output_key)
    if environment and environment.kind in KINDS and isinstance(expected, str | int | float):
        try:
            kind_class(environment.kind).check_answer(str(expected))
        except ValueError as error:
            return f"'{dataset.output_key}': env.{dataset.env_name} cannot judge by it: {error}"
    return None


def _check_messages(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> None:
    roles = [message["role"] for message in _messages(record, dataset.messages_key)]
    if not generates(recipe):
        if "assistant" not in roles or roles[0] == "assistant":
            raise ValueError(f"'{dataset.messages_key}' has no assistant's turn after another's: {roles}")
    elif roles == ["assistant"]:
        raise ValueError(f"'{dataset.messages_key}' has nothing before the assistant's answer")
    elif roles[-1] != "assistant" and judged_by_answer(recipe, dataset):
        _check_answer(recipe, record, dataset.output_key)


def _check_answer(recipe: Recipe, record: dict[str, Any], key: str) -> None:
    if not isinstance(record.get(key), list):
        _line(record, key)
        return
    if not generates(recipe):
        _refuse_bare(recipe, key)
    if (roles := [message["role"] for message in _messages(record, key)])[-1] != "assistant":
        raise ValueError(f"'{key}' does not end in an answer of the assistant's: {roles}")


def _asked(recipe: Recipe, record: dict[str, Any], key: str) -> str | None:
    """Return the prompt's text, if it is one."""
    if not isinstance(record.get(key), list):
        return _line(record, key)
    _refuse_bare(recipe, key)
    if _messages(record, key)[-1]["role"] == "assistant":
        raise ValueError(f"'{key}' must end where the assistant is to answer, and its last turn is the assistant's")
    return None


def _refuse_bare(recipe: Recipe, key: str) -> None:
    if not recipe.data.apply_chat_template:
        raise ValueError(f"'{key}' is a list of messages, and data.apply_chat_template is false")


def _check_pair(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> str | None:
    keys = (dataset.chosen_key, dataset.rejected_key)
    answers = [_value(record, key) for key in keys]
    if dataset.margin_key:
        margin = _value(record, dataset.margin_key)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ValueError(f"'{dataset.margin_key}' is {margin!r}, not a number")
    if isinstance(answers[0], list) != isinstance(answers[1], list):
        raise ValueError(f"of '{keys[0]}' and '{keys[1]}' one is a list of messages and the other is not")
    if isinstance(answers[0], list):
        begins_with_the_prompt = _check_conversations(recipe, record, keys)
    else:
        begins_with_the_prompt = False
        for key in keys:
            if not _line(record, key).strip():
                raise ValueError(f"'{key}' is empty")
    if answers[0] == answers[1]:
        raise ValueError(f"'{keys[0]}' and '{keys[1]}' are the same: nothing is preferred")
    if begins_with_the_prompt:
        return None
    if not dataset.messages_key:
        return _asked(recipe, record, dataset.input_key) if dataset.input_key else None
    if _messages(record, dataset.messages_key)[-1]["role"] == "assistant":
        raise ValueError(f"'{dataset.messages_key}' must end where the assistant is to answer")
    return None


def _check_conversations(recipe: Recipe, record: dict[str, Any], keys: tuple[str, str]) -> bool:
    """Return whether the prompt is in them."""
    if not recipe.data.apply_chat_template:
        raise ValueError(f"'{keys[0]}' is a list of messages, and data.apply_chat_template is false")
    for key in keys:
        last = _messages(record, key)[-1]
        if last["role"] != "assistant" or not last["content"].strip():
            raise ValueError(f"'{key}' does not end in an answer of the assistant's")
    return _messages(record, keys[0])[0]["role"] != "assistant"


def _messages(record: dict[str, Any], key: str) -> list[dict[str, str]]:
    return conversation(_value(record, key), key)


def _line(record: dict[str, Any], key: str) -> str:
    value = _value(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"'{key}' is a {type(value).__name__}, not a text or a number")
    return str(value)


def _value(record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise ValueError(f"no key '{key}'; there are: {', '.join(record) or 'none'}")
    return record[key]
