"""Score the form and the content of an answer between tags: <think>...</think>, a new line, <answer>...</answer>.

Each of three checks is a reward of its own, for `env.NAME.rewards`. Together they are NeMo-RL's environment `math_multi_reward`
(nemo_rl/environments/math_environment.py), with which it trains GDPO.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, EnvironmentContext, Outcome
from pipeline.recipe.values import MISSING

if TYPE_CHECKING:
    from pipeline.types import Prompt

OPEN, CLOSE = "<answer>", "</answer>"
FORM = re.compile(rf"<think>.*?</think>\n{OPEN}.*?{CLOSE}\n?", re.DOTALL)


@dataclass
class AnswerTagsArguments:
    """The kwargs of `kind: answer_tags`."""

    check: Literal["correct", "integer", "format"] = MISSING  # type: ignore[assignment]
    """What is worth 1. correct: the text between the answer's tags is the expected answer. integer: it has digits alone.
    format: the response is <think>...</think>, a new line, and <answer>...</answer>, with one answer."""


class AnswerTags(BuiltinEnvironment):
    """Checks the text between the last <answer> and </answer>, or else the whole text. Metric of `correct`: `accuracy`."""

    Arguments = AnswerTagsArguments

    def __init__(self, arguments: AnswerTagsArguments, context: EnvironmentContext) -> None:
        self._check = arguments.check

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        extracted = text.rpartition(OPEN)[2].partition(CLOSE)[0].strip()
        if self._check == "format":
            return Outcome(float(text.count(OPEN) == text.count(CLOSE) == 1 and bool(FORM.fullmatch(text))))
        if self._check == "integer":
            return Outcome(float(extracted.isdigit()))
        right = float(extracted == prompt.task["answer"])
        return Outcome(right, {"accuracy": right}, extracted=extracted)
