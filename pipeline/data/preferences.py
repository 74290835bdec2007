"""Encode a record as a pair: a chosen and a rejected answer to the same prompt, for DPO and reward models.

The answers in the columns `chosen_key` and `rejected_key` are both texts or both lists of messages {role, content}:

    texts       The prompt is in the column `messages_key`, else `input_key`. If `input_key` is "", the prompt is the common
                beginning of both texts (hh-rlhf), up to a word boundary; TRL's `extract_prompt` also splits within a word.
    messages    If they begin with the assistant's turn, the prompt is in a column, as for texts.
    messages    If they begin with the system's or the user's turn, their common beginning is the prompt.

The loss counts the assistant's turns after the prompt and the token that ends each of them (the end-of-sequence token without a
chat template). We remove the text that the template writes after the last of these tokens, such as the newline after ChatML's
<|im_end|>, so that a reward model is evaluated at the token where a sampled answer ends. TRL and NeMo-RL keep and count this
text. If conversations differ in more than the last turn, TRL also counts the user's later turns; NeMo-RL counts only the last
turn.

Not supported: more than two answers to a prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.data.chat import Encoded, Encoder
from pipeline.types import Sample

Pair = tuple[Sample, Sample]
"""(chosen, rejected). `Sample.reward` of the chosen sample is the margin; log-probs and advantages are 0."""


def encode_pair(encoder: Encoder, position: int, record: dict[str, Any]) -> Pair:
    """Return the chosen and the rejected sample of a record.

    Raise ValueError as `RecordReader.pair` does, if both samples have the same tokens, or if the chat template does not
    separate the answers from the prompt.
    """
    chosen, rejected = (_until_the_answer_ends(*encoder.encode(turns)) for turns in encoder.pair(record))
    if np.array_equal(chosen[0], rejected[0]):
        raise ValueError(
            f"'{encoder.dataset.chosen_key}' and '{encoder.dataset.rejected_key}' have the same tokens; expected two answers"
        )
    return _sample(chosen, encoder.margin(record)), _sample(rejected, 0.0)


def _until_the_answer_ends(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    length = np.flatnonzero(mask)[-1] + 1
    return tokens[:length], mask[:length]


def _sample(encoded: Encoded, reward: float) -> Sample:
    tokens, mask = encoded
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros, reward=reward)
