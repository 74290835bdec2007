r"""Judge answers to GSM8K by the rules of lm-evaluation-harness's task gsm8k: a number after `#### `, or the last number.

Leaves out: equal numbers in different digits, such as 18 and 18.00, which `math` finds equal.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(?:-?[$0-9.,]{2,})|(?:-?[0-9]+)")


class GSM8KAnswer(BuiltinEnvironment):
    """Reward 1 if the last number of the text is `prompt.task["answer"]`, else 0.

    Metrics: `accuracy`, the reward, which is also `flexible_extract`; `strict_match`, 1 if the first number after `#### ` is
    the expected one; `unparsed`, 1 if there is no number.
    """

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: Any) -> None:
        if not re.search(r"\d", normalize(answer)):
            raise ValueError(f"got '{answer}'; expected a number, or a solution with a number after ####")

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        expected = normalize(prompt.task["answer"])
        strict, numbers = STRICT.search(text), FLEXIBLE.findall(text)
        extracted = normalize(numbers[-1]) if numbers else ""
        right = float(bool(numbers) and extracted == expected)
        strict_match = float(strict is not None and normalize(strict[1]) == expected)
        metrics = {"accuracy": right, "flexible_extract": right, "strict_match": strict_match, "unparsed": float(not numbers)}
        return Outcome(right, metrics, extracted=extracted)


def normalize(number: str) -> str:
    """Return the normal form of a number, in which numbers are compared."""
    number = re.sub(r"\.$", "", number.replace(",", "").replace("$", "").rpartition("#### ")[2])
    return number.strip().lower()
