"""Recognize the columns of a data set if the recipe leaves the keys for columns at their defaults.

The columns are those of TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats), of chats and of common data
sets. The first record of a file decides, and `Columns.description` describes the result:

    sft           messages | prompt, completion | text | question, answer | problem, solution | ...
    dpo, rm       [prompt,] chosen, rejected
    kto           prompt, completion, label | question, answer, label | ... | [prompt,] chosen, rejected
    others        prompt | messages | question | problem, and answer | solution | completion, if an answer is needed

The column `text` has a text. The others have a text, or a list of messages {role, content} or ShareGPT's {from, value}. A
dotted name is a field of a nested column, such as `reward_model.ground_truth` of verl's data.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import LABELED, PAIRED, DatasetConfig, Recipe, generates, judged_by_expected_answers
from pipeline.data.media import refuse_media

Message = dict[str, Any]
"""A turn of a conversation: {"role": ..., "content": ...} and other fields for its chat template, such as tool_calls."""

KEYS = ("input_key", "output_key", "messages_key", "text_key", "chosen_key", "rejected_key")
CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("input", "prompt", "question", "problem", "query", "instruction")
EXPECTED = (
    "output",
    "answer",
    "expected_answer",
    "ground_truth",
    "reward_model.ground_truth",
    "solution",
    "completion",
    "response",
)
"""Columns for the expected answer, in order of preference: columns of a final answer before those of a whole solution."""
LEARNED = {
    "input": ("output", "answer", "completion", "response"),
    "prompt": ("completion", "response"),
    "question": ("answer", "response"),
    "problem": ("solution", "answer"),
    "query": ("response", "answer"),
    "instruction": ("response", "output"),
}
"""Prompt column -> answer columns in training. If a record has two of them, the recipe must choose."""
ANSWER_NAMES = ("gold", "gold_answer", "target", "label", "reference", "final_answer", "reference_answer", "correct_answer")
LABELS = (
    "id",
    "uid",
    "index",
    "idx",
    "source",
    "data_source",
    "dataset",
    "category",
    "subject",
    "level",
    "type",
    "split",
    "url",
)
"""Names of columns that describe a record, such as its source. Hints suggest them last."""
TEXT = "text"
MOST_TRIED = 100
"""The number of records that are tried until one is readable."""
SHAREGPT = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
DEFAULTS: dict[str, Any] = {name: getattr(DatasetConfig(), name) for name in KEYS}


@dataclass(frozen=True)
class Columns:
    """A data set's configuration with the recognized columns."""

    dataset: DatasetConfig  # with the keys of its columns
    description: str = ""  # for the log; empty if the recipe's own columns exist


def recognize_columns(recipe: Recipe, key: str, dataset: DatasetConfig, records: Iterable[Any]) -> Columns:
    """Return the columns of a data set from its first record or, if bad records are dropped, from its first readable record.

    key: the recipe's key of the data set, such as data.train. A key that the recipe sets is never replaced. Raise ValueError,
    with suggestions of keys to set, if the record can be read in no way or in several ways.
    """
    wrong: ValueError | None = None
    for record in itertools.islice(records, MOST_TRIED if recipe.data.bad_records == "drop" else 1):
        try:
            return _of_record(recipe, key, dataset, record)
        except ValueError as error:
            wrong = wrong or error
    if wrong:
        raise wrong
    return Columns(dataset)


def _of_record(recipe: Recipe, key: str, dataset: DatasetConfig, record: Any) -> Columns:
    if not isinstance(record, Mapping) or dataset.messages_key or dataset.text_key:
        return Columns(dataset)
    refuse_media(record)
    recipe_keys = {name: value for name in KEYS if (value := getattr(dataset, name)) != DEFAULTS[name]}
    if recipe.algorithm in LABELED and _is_pair(dataset, record):
        dataset = replace(dataset, label_key=None)
    paired = learns_pairs(recipe, dataset)
    if paired:
        readings = list(_pairs(recipe, recipe_keys, record))
    elif generates(recipe):
        readings = list(_prompts(recipe_keys, record, judged_by_answer(recipe, dataset)))
    else:
        readings = list(_examples(recipe_keys, record))
        if recipe.algorithm in LABELED:
            readings = [reading for reading in readings if "text_key" not in reading]
    if len(readings) != 1:
        raise ValueError(_choices(recipe, key, recipe_keys, record, readings, paired))
    keys = {name: value for name, value in readings[0].items() if value != getattr(dataset, name)}
    if not keys:
        return Columns(dataset)
    rendered = ""
    if recipe.data.apply_chat_template and isinstance(column(record, readings[0].get("input_key", "")), str):
        rendered = ", rendered by the chat template; data.apply_chat_template=false uses plain text, as TRL does"
    return Columns(replace(dataset, **keys), _describe(readings[0]) + rendered)


def learns_pairs(recipe: Recipe, dataset: DatasetConfig) -> bool:
    """Return whether the records of a data set, whose columns are recognized, are pairs of answers to learn from."""
    return recipe.algorithm in PAIRED or (recipe.algorithm in LABELED and dataset.label_key is None)


def _is_pair(dataset: DatasetConfig, record: Mapping[str, Any]) -> bool:
    """Return whether a record has two answers and no label."""
    labeled = dataset.label_key is not None and column(record, dataset.label_key) is not None
    return not labeled and _has(record, dataset.chosen_key) and _has(record, dataset.rejected_key)


def judged_by_answer(recipe: Recipe, dataset: DatasetConfig) -> bool:
    """Return whether the data set's environment needs expected answers. Reward models and user code may not need them."""
    return judged_by_expected_answers(recipe.env, dataset.env_name)


# ---- values of a record --------------------------------------------------------------------------------------------------


def column(record: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a column or of a field of a nested column: "a.b" is column "a.b", else field "b" of column "a".

    The nested column may be a JSON text, as in a cell of CSV.
    """
    if name in record:
        return record[name]
    outer, dot, inner = name.partition(".")
    nested = _nested(record.get(outer)) if dot else None
    return column(nested, inner, default) if isinstance(nested, Mapping) else default


def _nested(value: Any) -> Any:
    """Return the mapping of a JSON text, other values unchanged."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def column_names(record: Mapping[str, Any]) -> list[str]:
    """Return the names of a record's columns. A nested column is replaced by the dotted names of its fields."""
    names: list[str] = []
    for name, value in record.items():
        fields = _nested(value)
        nested = column_names(fields) if isinstance(fields, Mapping) else []
        names += [f"{name}.{inner}" for inner in nested] or [name]
    return names


# ---- possible columns of a record -------------------------------------------------------------------------------------------

Reading = dict[str, str]
"""Key of DatasetConfig -> column."""


def _examples(recipe_keys: Reading, record: Mapping[str, Any]) -> Iterator[Reading]:
    """Yield each possible choice of columns for supervised training. recipe_keys: the keys that the recipe sets."""
    prompts, answer = [recipe_keys["input_key"]] if "input_key" in recipe_keys else PROMPTS, recipe_keys.get("output_key")
    readings = [
        {"input_key": name, "output_key": learned}
        for name in prompts
        for learned in ([answer] if answer else LEARNED.get(name, EXPECTED))
        if learned != name and _has(record, name) and _has(record, learned)
    ]
    alpaca = "instruction" in record and not recipe_keys  # `input` is then the context of the instruction
    if readings[:1] == [{"input_key": "input", "output_key": "output"}] and not alpaca:
        readings = readings[:1]
    yield from readings
    if recipe_keys:
        return
    if readings[:1] != [{"input_key": "input", "output_key": "output"}]:
        yield from ({"messages_key": name} for name in CONVERSATIONS if _is_conversation(record.get(name)))
        yield from [{"text_key": TEXT}] if isinstance(record.get(TEXT), str) else []


def _prompts(recipe_keys: Reading, record: Mapping[str, Any], judged: bool) -> Iterator[Reading]:
    prompts = [recipe_keys["input_key"]] if "input_key" in recipe_keys else PROMPTS
    names = [name for name in prompts if _has(record, name)]
    for name in names[:1] if names[:1] == ["input"] else names:
        answers = [recipe_keys["output_key"]] if "output_key" in recipe_keys else [col for col in EXPECTED if col != name]
        answer = next((col for col in answers if _has(record, col)), None)
        if answer or not judged:
            yield {"input_key": name, "output_key": answer or {**DEFAULTS, **recipe_keys}["output_key"]}
    if names[:1] == ["input"] or "input_key" in recipe_keys:
        return
    answers = [recipe_keys["output_key"]] if "output_key" in recipe_keys else EXPECTED
    answer = next((col for col in answers if _has(record, col)), None)
    for name in CONVERSATIONS:
        if not _is_conversation(record.get(name)):
            continue
        if parse_conversation(record[name], name)[-1]["role"] == "assistant" or not judged:
            yield {"messages_key": name}
        elif answer:
            yield {"messages_key": name, "output_key": answer}


def _pairs(recipe: Recipe, recipe_keys: Reading, record: Mapping[str, Any]) -> Iterator[Reading]:
    columns = {**DEFAULTS, **recipe_keys}
    answers = [columns[name] for name in ("chosen_key", "rejected_key")]
    if not all(_has(record, name) for name in answers):
        return
    chosen = column(record, answers[0])
    if "input_key" in recipe_keys or (_is_conversation(chosen) and parse_conversation(chosen, "")[0]["role"] != "assistant"):
        yield {}  # the recipe names the prompt, or both answers include it
        return
    names = [name for name in PROMPTS if _has(record, name)]
    readings = [{"input_key": name} for name in (names[:1] if names[:1] == ["input"] else names)]
    if names[:1] != ["input"]:
        readings += [{"messages_key": name} for name in ("context", *CONVERSATIONS) if _is_conversation(record.get(name))]
    if not readings and isinstance(chosen, str) and not recipe.data.apply_chat_template:
        readings = [{"input_key": ""}]  # the common beginning of both
    yield from readings


def _has(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a column holds a text, a number or a list of messages."""
    value = column(record, name)
    return (isinstance(value, str | int | float) and not isinstance(value, bool)) or _is_conversation(value)


def _is_conversation(value: Any) -> bool:
    try:
        parse_conversation(value, "")
    except ValueError:
        return False
    return True


def parse_conversation(value: Any, key: str) -> list[Message]:
    """Return a list of messages {role, content}. The given messages may also be ShareGPT's {from, value}.

    Messages {role, content} keep their other fields. Raise ValueError for other values.
    """
    messages = value
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value):
        if unknown := [str(m["from"]) for m in value if m["from"] not in SHAREGPT]:
            raise ValueError(f"'{key}' has a turn from '{unknown[0]}'; expected one of: {', '.join(SHAREGPT)}")
        messages = [{"role": SHAREGPT[m["from"]], "content": m["value"]} for m in value]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"'{key}' is not a list of {{role, content}} messages whose values are texts")
    return messages


def _is_message(value: Any) -> bool:
    """Return whether a value is a turn with a text. The assistant's turn may have tool calls in place of a text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value["role"] == "assistant" and value.get("tool_calls")
    return isinstance(value.get("content"), str) or bool(calls and value.get("content") is None)


# ---- descriptions ----------------------------------------------------------------------------------------------------------

DESCRIPTIONS = {
    "input_key": "'{}' as the prompt",
    "output_key": "'{}' as the answer",
    "messages_key": "'{}' as a conversation",
    "text_key": "'{}' as a text (every token counts in the loss)",
}


def _describe(reading: Reading) -> str:
    parts = [DESCRIPTIONS[name].format(column_name) for name, column_name in reading.items() if column_name]
    return f"reads {' and '.join(parts)}" if parts else "reads the common beginning of both answers as the prompt"


def guess_columns(keys: list[str], columns: list[str], judged: bool) -> Reading:
    """Return key -> a likely column: a column with a usual name for this key, else the first without a usual name.

    judged: whether the answer is judged, not learned. The default, `output`, is then less likely than a final answer.
    """
    unused, guess = list(columns), {}
    expected = (*EXPECTED[1:], *EXPECTED[:1]) if judged else EXPECTED
    for key in keys:
        likely = {"input_key": PROMPTS, "output_key": (*expected, *ANSWER_NAMES)}.get(key, ())
        last = {name: name.rpartition(".")[2].lower() for name in unused}
        usual = [name for known in likely for name in unused if last[name] == known]
        unusual = [name for name in unused if last[name] not in (*LABELS, *PROMPTS, *EXPECTED, *ANSWER_NAMES)]
        guess[key] = next(iter([*usual, *unusual, *unused]), "COLUMN")
        unused = [name for name in unused if name != guess[key]]
    return guess


def _choices(
    recipe: Recipe, key: str, recipe_keys: Reading, record: Mapping[str, Any], readings: list[Reading], paired: bool
) -> str:
    names = column_names(record)
    kinds = {name: "" if _has(record, name) else f" (a {type(column(record, name)).__name__})" for name in names}
    columns = ", ".join(f"{name}{kind}" for name, kind in kinds.items()) or "none"
    if readings:
        choices = [
            " ".join(f"{key}.{name}={column_name}" for name, column_name in reading.items() if column_name != DEFAULTS[name])
            for reading in readings
        ]
        choices = [choice or "a file without the other columns" for choice in choices]
        return f"its columns ({columns}) can be read in {len(readings)} ways; expected one. Try {' or '.join(choices)}"
    keys = ("input_key", "chosen_key", "rejected_key") if paired else ("input_key", "output_key")
    key_columns = {name: {**DEFAULTS, **recipe_keys}[name] for name in keys}
    lacking = [name for name, column_name in key_columns.items() if not _has(record, column_name)]
    usable = [name for name in names if _has(record, name) and name not in key_columns.values()]
    guess = guess_columns(lacking, usable, generates(recipe))
    hint = " ".join(f"{key}.{name}={column_name}" for name, column_name in guess.items())
    bare = ""
    if paired and lacking == ["input_key"] and isinstance(column(record, key_columns["chosen_key"]), str):
        bare = ", or data.apply_chat_template=false, which takes the common beginning of both answers as the prompt"
    lacking_columns = " or ".join(f"'{key_columns[name]}'" for name in lacking)
    conversation = next((name for name in CONVERSATIONS if _is_conversation(record.get(name))), None)
    if conversation and not paired:  # keys of the recipe hide it, mostly those of one that it inherits from
        answered = parse_conversation(record[conversation], conversation)[-1]["role"] == "assistant"
        answer_hints = [] if answered else [f"{key}.output_key={guess[name]}" for name in ("output_key",) if name in guess]
        hint = " ".join([f"{key}.messages_key={conversation}", *answer_hints])
    return f"no column {lacking_columns} with a string or messages; there are: {columns}. Try {hint}{bare}"
