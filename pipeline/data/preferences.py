"""From a record to a pair: a chosen and a rejected answer to the same prompt, for DPO and reward models.

The answers, `chosen_key` and `rejected_key`, are both texts or both lists of messages {role, content}:

    texts       after the prompt: that of `messages_key`, else of `input_key`; where that is "", the words that both begin with
                (hh-rlhf), as TRL's `extract_prompt` has it, which also parts them within a word
    messages    from the assistant's turn on, after the same prompt
    messages    of the whole conversation, from the system's or the user's turn on: their common beginning is the prompt

The loss counts what the assistant says after the prompt, up to and with its end-of-turn token, or without a chat template the
end-of-sequence token. What a template writes behind that (the newline after ChatML's <|im_end|>) is cut off, so that a reward
model's score is read where a sampled answer ends; TRL and NeMo-RL keep and count it. Where conversations part more than one
turn before their end, TRL also counts what the user says from there on, and NeMo-RL the last turn alone.

Leaves out: more than two answers to a prompt.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from pipeline.data.chat import Encoded, Encoder, Message, messages_of, text_of
from pipeline.types import Sample

Pair = tuple[Sample, Sample]
"""Chosen, rejected. `Sample.reward` of the chosen one is the margin; log-probs and advantages are 0."""


def encode_pair(encoder: Encoder, position: int, record: dict[str, Any]) -> Pair:
    """Raises ValueError if an answer is missing or empty, if both are the same or not to the same prompt, if `margin_key` is no
    number, or if the chat template does not let the answers be told from the prompt."""
    dataset = encoder.dataset
    keys = (dataset.chosen_key, dataset.rejected_key)
    of_messages = [isinstance(record.get(key), list) for key in keys]
    if of_messages[0] != of_messages[1]:
        raise ValueError(f"of '{keys[0]}' and '{keys[1]}' one is a list of messages and the other is not")
    if of_messages[0]:
        encoded = _of_messages(encoder, record, *(messages_of(record, key) for key in keys))
    else:
        encoded = _of_texts(encoder, record, keys)
    chosen, rejected = (_until_the_answer_ends(*one) for one in encoded)
    if np.array_equal(chosen[0], rejected[0]):
        raise ValueError(f"'{keys[0]}' and '{keys[1]}' are the same")
    margin = _margin(record, dataset.margin_key) if dataset.margin_key else 0.0
    return _sample(chosen, margin), _sample(rejected, 0.0)


def _of_texts(encoder: Encoder, record: dict[str, Any], keys: tuple[str, str]) -> list[Encoded]:
    answers = [text_of(record, key) for key in keys]
    begun_alike = not encoder.dataset.input_key and not encoder.dataset.messages_key
    asked = {encoder.dataset.input_key: _begun_alike(*answers)} if begun_alike else record
    if begun_alike:
        answers = [answer[len(asked[encoder.dataset.input_key]) :] for answer in answers]
    for key, answer in zip(keys, answers, strict=True):
        if not answer.strip():
            raise ValueError(f"'{key}' is {'all in the other' if begun_alike else 'empty'}")
    if not encoder.data.apply_chat_template:
        prompt = encoder.prompt(asked)
        return [encoder.encode_answer(prompt, answer) for answer in answers]
    turns = _prompt(encoder, asked)
    return [encoder.encode_turns([*turns, {"role": "assistant", "content": answer}], len(turns)) for answer in answers]


def _begun_alike(one: str, other: str) -> str:
    """The whole words that both begin with, without the space after them. Raises ValueError if there are none."""
    same = one[: sum(itertools.takewhile(bool, (a == b for a, b in zip(one, other, strict=False))))]
    end = max(same.rfind(" "), same.rfind("\n") + 1)
    if not same[: max(end, 0)].strip():
        raise ValueError("the answers do not begin with the same words, which are the prompt where no column has it")
    return same[:end]


def _of_messages(
    encoder: Encoder, record: dict[str, Any], chosen: list[Message], rejected: list[Message]
) -> tuple[Encoded, Encoded]:
    if not encoder.data.apply_chat_template:
        raise ValueError("the answers are lists of messages, and data.apply_chat_template is false")
    keys = f"'{encoder.dataset.chosen_key}' and '{encoder.dataset.rejected_key}'"
    for messages in (chosen, rejected):
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            raise ValueError(f"{keys}: one does not end in an answer of the assistant's: {[m['role'] for m in messages]}")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = _prompt(encoder, record)
        chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
    else:
        chosen, rejected = encoder.completed(chosen), encoder.completed(rejected)
    if chosen == rejected:
        raise ValueError(f"{keys} are the same")
    first = _common(chosen, rejected)
    if any(not messages[first:] or messages[first]["role"] != "assistant" for messages in (chosen, rejected)):
        raise ValueError(f"{keys} are not two answers to the same prompt: they do not part at a turn of the assistant's")
    return tuple(encoder.encode_turns(messages, first) for messages in (chosen, rejected))


def _prompt(encoder: Encoder, record: dict[str, Any]) -> list[Message]:
    """With a chat template, and where the answers do not have the prompt in them."""
    key = encoder.dataset.messages_key
    if key is None:
        return encoder.question(record)
    messages = messages_of(record, key)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"'{key}' must end where the assistant is to answer, and its last turn is the assistant's")
    return encoder.completed(messages)


def _common(one: list[Message], other: list[Message]) -> int:
    """How many messages both begin with."""
    same = (a["role"] == b["role"] and a["content"] == b["content"] for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def _until_the_answer_ends(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    length = np.flatnonzero(mask)[-1] + 1
    return tokens[:length], mask[:length]


def _margin(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"'{key}' is {value!r}, not a number")
    return float(value)


def _sample(encoded: Encoded, reward: float) -> Sample:
    tokens, mask = encoded
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros, reward=reward)
