"""Encode answers with preferences: pairs of a chosen and a rejected answer, and answers that are labeled good or bad.

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

KTO learns from labeled answers, in the columns of supervised training and `label_key`, or from both answers of a pair
(`SplitPairs`).

Not supported: more than two answers to a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.data.chat import Encoded, Encoder
from pipeline.data.processors import as_records
from pipeline.types import Sample

Record = dict[str, Any]
Pair = tuple[Sample, Sample]
"""(chosen, rejected). `Sample.reward` of the chosen sample is the margin; log-probs and advantages are 0."""


def encode_pair(encoder: Encoder, position: int, record: Record) -> Pair:
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


ANSWER = "answer of the pair"
"""The column of `SplitPairs` with the answer's number."""


class SplitPairs(Sequence):
    """The answers of pairs as records of their own: record 2i is the chosen answer of pair i, and 2i + 1 the rejected one."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return 2 * len(self._records)

    def __getitem__(self, index: int) -> list[Record]:
        return [{**record, ANSWER: index % 2} for record in as_records(self._records[index // 2])]

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return (the pairs, the number of the pair that has answer `index`)."""
        return self._records, index // 2


def encode_labeled(encoder: Encoder, position: int, record: Record) -> Sample:
    """Return the sample of a labeled answer, or of one answer of a pair. Its reward is 1 if the answer is good, else 0.

    Raise ValueError as `RecordReader.labeled` and `Encoder.encode` do.
    """
    example, good = encoder.labeled(record)[record.get(ANSWER, 0)]
    return _sample(_until_the_answer_ends(*encoder.encode(example)), float(good))


def _until_the_answer_ends(tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    length = np.flatnonzero(mask)[-1] + 1
    return tokens[:length], mask[:length]


def _sample(encoded: Encoded, reward: float) -> Sample:
    tokens, mask = encoded
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros, reward=reward)
