"""Read the named data sets as records in our columns.

    input, output             a question, and the answer to expect or to learn
    messages                  a conversation that ends in the answer
    context, chosen, rejected pairs: the conversation before the answers, and the two answers

Prompts and answers are those of NeMo-RL's data sets with the same names. `pipeline/config/data.py` has their repositories,
subsets and splits. Each access makes a record from its row, and raises ValueError if columns are missing.

Not supported: images, audio, tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pipeline.config import NAMED_DATASETS, DatasetConfig
from pipeline.data.records import Message, messages_of, text_of

Record = dict[str, Any]


def columns(dataset: DatasetConfig, paired: bool) -> DatasetConfig:
    """Return a named data set's configuration with the keys of our columns; other configurations unchanged.

    paired: whether the algorithm learns from the answers of pairs.
    """
    if (named := NAMED_DATASETS.get(dataset.dataset_name or "")) is None:
        return dataset
    messages = ("context" if paired else "messages") if named.conversations else None
    label = None if paired else dataset.label_key
    return dataclasses.replace(dataset, input_key="input", output_key="output", messages_key=messages, label_key=label)


def record(dataset: DatasetConfig, row: Record) -> Record:
    """Return a row of a named data set as a record. Raise ValueError if columns are missing."""
    named = NAMED_DATASETS[dataset.dataset_name or ""]
    if named.form != "answered":
        return READERS[named.form](row)
    chosen = named.output_key and dataset.output_key != DatasetConfig.output_key
    answer = dataset.output_key if chosen else named.answer
    return {"input": text_of(row, named.question), "output": _not_empty(row, answer)}


def _not_empty(row: Record, key: str) -> str:
    """Return the text in a column. Raise ValueError if it is empty, since no answer can be judged by an empty one."""
    if not (text := text_of(row, key)).strip():
        raise ValueError(f"'{key}' is empty")
    return text


def _gsm8k(row: Record) -> Record:
    """Return a GSM8K row as a record. The final answer follows the #### of the solution."""
    _, mark, answer = text_of(row, "answer").partition("####")
    if not mark:
        raise ValueError("'answer' has no ####; expected the final answer after it")
    return {"input": text_of(row, "question"), "output": answer.partition("####")[0].strip()}


def _dapo(row: Record) -> Record:
    judged = row.get("reward_model")
    if not isinstance(judged, dict):
        raise ValueError("'reward_model' is not an object; expected an object with 'ground_truth'")
    return {"input": messages_of(row, "prompt")[0]["content"], "output": _not_empty(judged, "ground_truth")}


def _squad(row: Record) -> Record:
    """Return a SQuAD row as a record. The passage becomes the system's turn, and the first of several answers is used."""
    answers = row.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not texts:
        raise ValueError("'answers' has no text")
    turns = (("system", text_of(row, "context")), ("user", text_of(row, "question")), ("assistant", texts[0]))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _conversation(row: Record) -> Record:
    messages = messages_of(row, "messages")
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"'messages' does not end in an answer of the assistant; the roles are {[m['role'] for m in messages]}"
        )
    return {"messages": _plain(messages)}


def _helpsteer3(row: Record) -> Record:
    """Return a HelpSteer3 row as a record.

    A preference below 0 selects the first response, above 0 the second. At 0 chosen and rejected are both the first response.
    """
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
        raise ValueError("'chosen' and 'rejected' are not two answers of the assistant to the same conversation")
    return {"context": chosen[:-1], "chosen": chosen[-1]["content"], "rejected": rejected[-1]["content"]}


def _plain(messages: list[Message]) -> list[Message]:
    """Return copies of the messages with only their role and content."""
    return [{"role": message["role"], "content": message["content"]} for message in messages]


READERS: dict[str, Callable[[Record], Record]] = {
    "conversation": _conversation,
    "dapo": _dapo,
    "gsm8k": _gsm8k,
    "helpsteer3": _helpsteer3,
    "squad": _squad,
    "tulu3_preference": _tulu3_preference,
}
"""`NamedDataset.form` -> reader, except for `answered`."""
