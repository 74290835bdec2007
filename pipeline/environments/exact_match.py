"""Right if the answer is, character by character, the expected one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.environments.base import BuiltinEnvironment, EnvironmentContext, Outcome, Pattern

if TYPE_CHECKING:
    from pipeline.types import Prompt


@dataclass
class ExactMatchArguments:
    pattern: Annotated[
        Pattern | None,
        Field(
            description="Regular expression of the answer: its last match counts, or that match's group if it has one, as"
            " `;(\\d+)$` has. null: the whole response."
        ),
    ] = None


class ExactMatch(BuiltinEnvironment):
    """Compares the stripped text, or what `pattern` finds in it, with `prompt.task["answer"]`. No match is wrong."""

    Arguments = ExactMatchArguments

    def __init__(self, arguments: ExactMatchArguments, setup: EnvironmentContext) -> None:
        self._pattern = re.compile(arguments.pattern) if arguments.pattern is not None else None

    def step(self, prompt: Prompt, text: str) -> Outcome:
        answer = text if self._pattern is None else self._extract(text)
        right = float(answer is not None and answer.strip() == prompt.task["answer"].strip())
        return Outcome(right, {"accuracy": right})

    def _extract(self, text: str) -> str | None:
        matches = self._pattern.findall(text)
        return matches[-1] if matches else None
