"""Right if the answer is, character by character, the expected one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pipeline.environments.base import Kind, Outcome, Setup, check_pattern
from pipeline.problems import Problem
from pipeline.types import Prompt
from pipeline.values import Text


@dataclass
class ExactMatchArguments:
    pattern: Annotated[
        Text | None,
        Field(
            description="Regular expression of the answer: its last match counts, or that match's group if it has one, as"
            " `;(\\d+)$` has. null: the whole response."
        ),
    ] = None


class ExactMatch(Kind):
    """Compares the stripped text, or what `pattern` finds in it, with `prompt.task["answer"]`. No match is wrong."""

    Arguments = ExactMatchArguments

    @classmethod
    def check(cls, key: str, arguments: ExactMatchArguments) -> Iterator[Problem]:
        if arguments.pattern is not None:
            yield from check_pattern(f"{key}.pattern", arguments.pattern)

    def __init__(self, arguments: ExactMatchArguments, setup: Setup) -> None:
        self._pattern = re.compile(arguments.pattern) if arguments.pattern is not None else None

    def step(self, prompt: Prompt, text: str) -> Outcome:
        answer = text if self._pattern is None else self._extract(text)
        right = float(answer is not None and answer.strip() == prompt.task["answer"].strip())
        return Outcome(right, {"accuracy": right})

    def _extract(self, text: str) -> str | None:
        matches = self._pattern.findall(text)
        return matches[-1] if matches else None
