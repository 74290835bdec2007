"""Formats of preferences: RewardBench and RewardBench 2."""

from __future__ import annotations

from typing_extensions import override

from pipeline.data.records import messages_of, text_of
from pipeline.evaluation.questions import Format, Question, Record


class RewardBench(Format):
    """Records {prompt, chosen, rejected, subset, id}. The prompt is a text or messages.

    RewardBench has one chosen and one rejected answer, each a text. RewardBench 2 has a list of texts for either.
    Groups: `subset`.
    """

    columns = ("prompt", "chosen", "rejected")

    @override
    def question(self, record: Record, index: int) -> Question:
        prompt = messages_of(record, "prompt") if isinstance(record["prompt"], list) else text_of(record, "prompt")
        answers = {key: _texts(record, key) for key in ("chosen", "rejected")}
        return Question(str(record.get("id", "")), prompt, task=answers, group=str(record.get("subset") or ""))


def _texts(record: Record, key: str) -> list[str]:
    texts = record[key] if isinstance(record[key], list) else [record[key]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"'{key}' is {record[key]!r}; expected a string, or a list of strings")
    return texts
