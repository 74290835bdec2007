"""The data sets that have names of their own, each as records in our columns:

    input, output             a question and the answer to expect, or to learn
    messages                  a conversation that ends in the answer
    context, chosen, rejected pairs: the conversation before, and the two answers

Prompts and answers are those of NeMo-RL's data sets of these names. Where they are, and their subsets and splits, says
`pipeline/config/data.py`. Records are made when they are asked for; one that lacks what it should have raises ValueError then.

Leaves out: pictures, sounds, tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pipeline.config import NAMED_DATASETS, DatasetConfig
from pipeline.data.records import Message, messages_of, text_of

Record = dict[str, Any]


def columns(dataset: DatasetConfig, paired: bool) -> DatasetConfig:
    """Return the configuration with the keys under which the records are found. paired: for an algorithm that learns
    preferences.
    """
    if (known := NAMED_DATASETS.get(dataset.dataset_name)) is None:
        return dataset
    messages = ("context" if paired else "messages") if known.conversations else None
    return dataclasses.replace(dataset, input_key="input", output_key="output", messages_key=messages)


def record(dataset: DatasetConfig, row: Record) -> Record:
    """Return a row of the named data set as a record. Raises ValueError if it is not in the data set's columns."""
    known = NAMED_DATASETS[dataset.dataset_name]
    if known.form != "answered":
        return READERS[known.form](row)
    chosen = known.output_key and dataset.output_key != DatasetConfig.output_key
    answer = dataset.output_key if chosen else known.answer
    return {"input": text_of(row, known.question), "output": _not_empty(row, answer)}


def _not_empty(row: Record, key: str) -> str:
    """Return an answer. Raises ValueError if it is empty, so that it judges nothing."""
    if not (text := text_of(row, key)).strip():
        raise ValueError(f"'{key}' is empty")
    return text


def _gsm8k(row: Record) -> Record:
    """Read a row whose answer is what follows the solution's ####."""
    _, mark, rest = text_of(row, "answer").partition("####")
    if not mark:
        raise ValueError("'answer' has no ####, behind which the final answer is")
    return {"input": text_of(row, "question"), "output": rest.partition("####")[0].strip()}


def _dapo(row: Record) -> Record:
    judged = row.get("reward_model")
    if not isinstance(judged, dict):
        raise ValueError("'reward_model' has no 'ground_truth'")
    return {"input": messages_of(row, "prompt")[0]["content"], "output": _not_empty(judged, "ground_truth")}


def _squad(row: Record) -> Record:
    """Read a row whose passage is the system's turn; of several answers the first."""
    answers = row.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not texts:
        raise ValueError("'answers' has no text")
    turns = (("system", text_of(row, "context")), ("user", text_of(row, "question")), ("assistant", texts[0]))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _conversation(row: Record) -> Record:
    messages = messages_of(row, "messages")
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"'messages' does not end in an answer of the assistant's: {[m['role'] for m in messages]}")
    return {"messages": _plain(messages)}


def _helpsteer3(row: Record) -> Record:
    """Read a row. A preference below 0 is for the first response. At 0 the chosen and the rejected answer are the same."""
    preference = row.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int | float):
        raise ValueError(f"'overall_preference' is {preference!r}, not a number")
    first, second = text_of(row, "response1"), text_of(row, "response2")
    chosen, rejected = (second, first) if preference > 0 else (first, second if preference else first)
    context = row.get("context")
    context = [{"role": "user", "content": context}] if isinstance(context, str) else _plain(messages_of(row, "context"))
    messages = [*context, {"role": "assistant", "content": chosen}]
    return {"context": context, "messages": messages, "chosen": chosen, "rejected": rejected}


def _tulu3_preference(row: Record) -> Record:
    chosen, rejected = (_plain(messages_of(row, key)) for key in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1] or chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        raise ValueError("'chosen' and 'rejected' are not two answers of the assistant's to one conversation")
    return {"context": chosen[:-1], "chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}


def _plain(messages: list[Message]) -> list[Message]:
    """Return messages without what else they may have."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


READERS: dict[str, Callable[[Record], Record]] = {
    "conversation": _conversation,
    "dapo": _dapo,
    "gsm8k": _gsm8k,
    "helpsteer3": _helpsteer3,
    "squad": _squad,
    "tulu3_preference": _tulu3_preference,
}
"""By `NamedDataset.form`, all but `answered`."""
