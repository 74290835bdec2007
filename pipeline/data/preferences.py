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

from typing import Any

import numpy as np

from pipeline.data.chat import Encoded, Encoder
from pipeline.types import Sample

Pair = tuple[Sample, Sample]
"""Chosen, rejected. `Sample.reward` of the chosen one is the margin; log-probs and advantages are 0."""


def encode_pair(encoder: Encoder, position: int, record: dict[str, Any]) -> Pair:
    """Return the pair of a record. Raises ValueError as `RecordReader.pair` does, and if both answers are the same tokens, or
    the chat template does not let the answers be told from the prompt.
    """
    chosen, rejected = (_until_the_answer_ends(*encoder.encode(one)) for one in encoder.pair(record))
    if np.array_equal(chosen[0], rejected[0]):
        raise ValueError(f"'{encoder.dataset.chosen_key}' and '{encoder.dataset.rejected_key}' are the same")
    return _sample(chosen, encoder.margin(record)), _sample(rejected, 0.0)


def _until_the_answer_ends(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    length = np.flatnonzero(mask)[-1] + 1
    return tokens[:length], mask[:length]


def _sample(encoded: Encoded, reward: float) -> Sample:
    tokens, mask = encoded
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros, reward=reward)
