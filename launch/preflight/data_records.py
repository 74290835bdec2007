"""Check one record of a data file as the job reads it, but without a tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import PAIRED, DatasetConfig, Problem, Recipe, answer_check, generates
from pipeline.data.columns import column, column_names, guess_columns, judged_by_answer, parse_conversation
from pipeline.data.records import RecordReader


@dataclass(frozen=True)
class Fields:
    """Fields of a user's reward function. An environment that is a class has none."""

    required: Sequence[str]  # that it needs from a record
    kwargs: Sequence[str] = ()  # that kwargs give, in place of columns of the same names


def prompt(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig, fields: Sequence[str] = ()) -> str | None:
    """Check a record, and return its prompt's text; None if the prompt is a conversation.

    fields: the fields that the user's reward function needs. Raises ValueError with the first error.
    """
    reader, key = RecordReader(recipe.data, dataset), dataset.text_key or dataset.input_key
    if recipe.algorithm in PAIRED:
        reader.pair(record)
        reader.margin(record)
        chosen = column(record, dataset.chosen_key)
        if isinstance(chosen, list) and parse_conversation(chosen, dataset.chosen_key)[0]["role"] != "assistant":
            return None  # the conversation contains the prompt
    elif generates(recipe):
        reader.question(record)
        if judged_by_answer(recipe, dataset):
            reader.answer(record)
        reader.check_fields(record, fields)
    else:
        reader.example(record)
    text = None if dataset.messages_key and not dataset.text_key else column(record, key)
    return None if text is None or isinstance(text, list) else str(text)


def learned_answers(recipe: Recipe, record: dict[str, Any], dataset: DatasetConfig) -> list[str]:
    """Return the answers that training learns from a valid record: one, two of a pair, or none of a conversation or a text."""
    if generates(recipe) or dataset.messages_key or dataset.text_key:
        return []
    keys = (dataset.chosen_key, dataset.rejected_key) if recipe.algorithm in PAIRED else (dataset.output_key,)
    values = [column(record, key) for key in keys]
    return [str(value) for value in values if not isinstance(value, list)]


class ExpectedAnswers:
    """Checks the first expected answers of a data set. The job checks the later ones where it uses them."""

    def __init__(self, recipe: Recipe, dataset: DatasetConfig) -> None:
        judged = generates(recipe) and judged_by_answer(recipe, dataset)
        self._check = answer_check(recipe.env, dataset.env_name) if judged else None
        self._reader = RecordReader(recipe.data, dataset)
        self._left = self._check.at_start if self._check else 0
        self._where = (
            f"'{dataset.messages_key or dataset.output_key}': env.{dataset.env_name} cannot use it as the expected answer"
        )

    def fault(self, record: dict[str, Any]) -> str | None:
        """Return why the environment cannot judge by a valid record's expected answer; None if it can."""
        if self._check is None or not self._left:
            return None
        self._left -= 1
        try:
            self._check.check(self._reader.answer(record))
        except ValueError as error:
            return f"{self._where}: {error}"
        return None


def absent_tools(recipe: Recipe, key: str, dataset: DatasetConfig, records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a note if the recipe names a column of tools that no record has. Later records may have it."""
    tools_key = dataset.tools_key
    if not tools_key or tools_key == DatasetConfig().tools_key or not recipe.data.apply_chat_template:
        return
    if all(column(record, tools_key) is None for record in records):
        close_names = difflib.get_close_matches(tools_key, [name for name in _columns(records) if name != tools_key], 1, 0.7)
        hint = f". Did you mean {close_names[0]}?" if close_names else ""
        message = f"none of the first {len(records)} records has tools in '{tools_key}'; their prompts list no tools"
        yield f"{key}.tools_key: {message}{hint}"


def replaced_columns(key: str, dataset: DatasetConfig, fields: Fields, records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a note for each argument of the user's reward function that kwargs give and the records have too."""
    for name in _field_names(dataset, records) if fields.kwargs else ():
        if name in fields.kwargs:
            argument = f"env.{dataset.env_name}.kwargs.{name}"
            yield f"{argument}: it replaces '{name}' of the records of {key}. Try another name to keep both"


def _columns(records: list[dict[str, Any]]) -> dict[str, None]:
    return dict.fromkeys(name for record in records for name in (*record, *column_names(record)))


def _field_names(dataset: DatasetConfig, records: list[dict[str, Any]]) -> dict[str, None]:
    """Return the names of the fields that records give a reward function."""
    columns = _columns(records)
    return columns | ({"expected": None} if dataset.output_key in columns or dataset.messages_key else {})


def absent_columns(
    recipe: Recipe,
    key: str,
    configured: DatasetConfig,
    dataset: DatasetConfig,
    fields: Sequence[str],
    records: list[dict[str, Any]],
) -> Iterator[Problem]:
    """Yield a problem if no record has a field that the user's reward function needs, or if `output_key` looks misspelt.

    configured: the data set as the recipe describes it. dataset: the data set with its recognized columns. fields: the fields
    that the function needs.
    """
    columns = _columns(records)
    if configured.output_key not in columns and (
        close_names := difflib.get_close_matches(configured.output_key, columns, 1, 0.7)
    ):
        message = f"got {configured.output_key}; expected one of the columns {', '.join(columns)}. Try {close_names[0]}"
        yield Problem(f"{key}.output_key", "missing-column", message)
        return
    names = _field_names(dataset, records)
    if absent := [field for field in fields if field not in names]:
        answer = guess_columns(["output_key"], list(columns), judged=True)["output_key"]
        hint = "a default for it, or a value in the environment's kwargs"
        hint = f"{key}.output_key={answer}" if absent[0] == "expected" else hint
        path = recipe.env[dataset.env_name or ""].kind
        message = f"{path} needs {absent[0]}, but the records of {key} have: {', '.join(columns)}. Try {hint}"
        yield Problem(f"env.{dataset.env_name}.kind", "missing-column", message)
