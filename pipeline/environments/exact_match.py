"""Compare the answer with the expected answer, character by character."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome, Pattern

if TYPE_CHECKING:
    from pipeline.types import Prompt


@dataclass
class ExactMatchArguments:
    """The kwargs of `kind: exact_match`."""

    pattern: Annotated[
        Pattern | None,
        Field(
            description="Regular expression of the answer, such as `;(\\d+)$`. Its last match counts, or the group of this"
            " match if the expression has a group. null: the whole response."
        ),
    ] = None


class ExactMatch(BuiltinEnvironment):
    """Compares the stripped text, or the match of `pattern` in it, with `prompt.task["answer"]`.

    No match is wrong. Metrics: `accuracy`; `unparsed`, 1 if nothing matches.
    """

    Arguments = ExactMatchArguments

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: ExactMatchArguments) -> None:
        if not answer.strip():
            raise ValueError("got an empty expected answer, which an empty response would match")

    def __init__(self, arguments: ExactMatchArguments, context: EnvironmentContext) -> None:
        self._pattern = re.compile(arguments.pattern) if arguments.pattern is not None else None

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        matches = [text] if self._pattern is None else self._pattern.findall(text)
        extracted = matches[-1].strip() if matches else ""
        right = float(bool(matches) and extracted == prompt.task["answer"].strip())
        return Outcome(right, {"accuracy": right, "unparsed": float(not matches)}, extracted=extracted)
