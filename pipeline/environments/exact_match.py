"""Right if the answer is, character by character, the expected one."""

from __future__ import annotations

import re

from pipeline.environments.base import Environment, Outcome
from pipeline.types import Prompt


class ExactMatch(Environment):
    """Compares the stripped text, or what `pattern` finds in it, with `prompt.task["answer"]`.

    `pattern` is a regular expression; its last match counts, or that match's group if it has one (`;(\\d+)$`: the digits after
    a last semicolon). A text that it does not match is wrong. None: the whole text counts.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = re.compile(pattern) if pattern is not None else None

    def step(self, prompt: Prompt, text: str) -> Outcome:
        answer = text if self._pattern is None else self._extract(text)
        right = float(answer is not None and answer.strip() == prompt.task["answer"].strip())
        return Outcome(right, {"accuracy": right})

    def _extract(self, text: str) -> str | None:
        matches = self._pattern.findall(text)
        return matches[-1] if matches else None
