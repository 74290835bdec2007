"""Encode a record as a pair: a chosen and a rejected answer to the same prompt, for DPO and reward models.

The answers, `chosen_key` and `rejected_key`, are both texts or both lists of messages {role, content}:

    texts       after the prompt in `messages_key`, else in `input_key`. If that is "", the prompt is the common beginning of
                both texts (hh-rlhf), at a word boundary; TRL's `extract_prompt` also splits within a word.
    messages    from the assistant's turn on, after the same prompt
    messages    of the whole conversation, from the system's or the user's turn on; the common beginning is the prompt

The loss counts the assistant's turns after the prompt including their end-of-turn token, or the end-of-sequence token without a
chat template. Text that the template writes after it (the newline after ChatML's <|im_end|>) is removed, so that a reward model
is evaluated at the token where a sampled answer ends; TRL and NeMo-RL keep and count it. If conversations differ in more than
the last turn, TRL also counts the user's later turns, and NeMo-RL only the last turn.

Not supported: more than two answers to a prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.data.chat import Encoded, Encoder
from pipeline.types import Sample

Pair = tuple[Sample, Sample]
"""Chosen, rejected. `Sample.reward` of the chosen one is the margin; log-probs and advantages are 0."""


def encode_pair(encoder: Encoder, position: int, record: dict[str, Any]) -> Pair:
    """Return the pair of a record.

    Raise ValueError as `RecordReader.pair` does, if both answers have the same tokens, or if the chat template does not
    separate the answers from the prompt.
    """
    chosen, rejected = (_until_the_answer_ends(*encoder.encode(turns)) for turns in encoder.pair(record))
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
