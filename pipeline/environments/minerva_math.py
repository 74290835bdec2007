r"""Judge answers to Minerva's prompt by math-verify, and report Minerva's own comparison of normalized texts as a metric.

Minerva (arXiv:2206.14858, appendix D.1) takes the answer from "Final Answer: The final answer is X. I hope it is correct.", as
its worked examples end, and normalizes it. Unit words are removed only as whole words, so \left keeps its "ft".
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.environments.dapo_math import REMOVED, REPLACED, UNWRAPPED, WORDS
from pipeline.environments.environment import NoArguments, Outcome
from pipeline.environments.math import Math, MathArguments

if TYPE_CHECKING:
    from pipeline.environments.environment import Environment, EnvironmentContext
    from pipeline.types import Prompt

END = "I hope it is correct."
BEGIN = "Final Answer: The final answer is"
LONGEST = 1000  # characters of a final answer that is normalized; no expected answer is as long
UNITS = tuple(word for word in (*WORDS.split(), "ft") if word.isalpha())
MARKS = tuple(mark for mark in REMOVED if mark not in UNITS)
BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?= ))|[{}]")
COMMAND = re.compile(r"(\\[a-zA-Z]+)")
INDEXED_ROOT = re.compile(r"(sqrt)(\[[^\]]*\])(\w)")
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+")


class MinervaMath(Math):
    """Reward 1 if math-verify finds the text's answer equal to `prompt.task["answer"]`, else 0.

    Metrics: those of `math`; `exact_match`, 1 if the normalized final answer equals the expected answer, as a text or by
    math-verify; `no_final_answer`, 1 if the text lacks Minerva's words.
    """

    Arguments = NoArguments

    @classmethod
    @override
    def build(cls, arguments: NoArguments, context: EnvironmentContext) -> Environment:
        return cls(arguments, context)

    @classmethod
    @override
    def check_answer(cls, answer: str, arguments: NoArguments) -> None:
        super().check_answer(answer, MathArguments())

    def __init__(self, arguments: NoArguments, context: EnvironmentContext) -> None:
        super().__init__(MathArguments(), context)

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        outcome = super().step(prompt, text)
        answer, expected = final_answer(text), normalize(prompt.task["answer"])
        is_equal = answer is not None and bool(answer) and answer == expected
        if answer and expected and not is_equal:
            task = {**prompt.task, "answer": expected}
            is_equal = bool(super().step(replace(prompt, task=task), f"\\boxed{{{answer}}}").reward)
        metrics = {**outcome.metrics, "exact_match": float(is_equal), "no_final_answer": float(answer is None)}
        return replace(outcome, metrics=metrics, extracted=answer or outcome.extracted)


def final_answer(text: str) -> str | None:
    """Return the normalized answer after Minerva's words; None if the text lacks them."""
    for line in (text + END).split("\n"):  # END may have been a stop string
        begin = line.find(BEGIN)
        # Any character may stand before END, and any may be its last: lm-evaluation-harness's pattern has a dot for both.
        end = line[:-1].find(f" {END[:-1]}", begin + len(BEGIN) + 1)
        if begin >= 0 and end >= 0:
            answer = line[begin + len(BEGIN) : end - 1].strip()
            return normalize(answer) if len(answer) <= LONGEST else answer
    return None


def normalize(answer: str) -> str:
    """Return the normal form of an answer, in which answers are compared."""
    answer = answer.split("=")[-1]
    for unit in UNITS:
        answer = re.sub(rf"(?<!\\)\b{re.escape(unit)}\b", "", answer)
    for old, new in REPLACED:
        answer = answer.replace(old, new)
    for unit in UNITS:  # without spaces, a unit is joined to the word before it
        parts = COMMAND.split(answer)
        answer = "".join(part if index % 2 else part.replace(unit, "") for index, part in enumerate(parts))
    for mark in MARKS:
        answer = answer.replace(mark, "")
    for pattern, new in UNWRAPPED[:-1]:
        answer = pattern.sub(new, answer)
    answer = INDEXED_ROOT.sub(r"\1\2{\3}", answer)
    answer = re.sub(r"(sqrt)(?!\[)([^{])", r"sqrt{\2}", answer).replace("$", "")
    return answer.replace(",", "") if THOUSANDS.fullmatch(answer) else answer


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} or \fbox{...}, or of `\boxed X`; None if there is no box."""
    box, begin, end = -1, 0, 0
    # (position of its box or -1, position of its content) of each open brace
    open_braces: list[tuple[int, int]] = []
    for match in BOX_OR_BRACE.finditer(text):
        if match[0].endswith("{"):
            open_braces.append((match.start() if len(match[0]) > 1 else -1, match.end()))
        elif match[0] != "}":
            box, begin, end = match.start(), match.end(), -1
        elif open_braces and open_braces[-1][0] > box:
            box, begin, end = *open_braces.pop(), match.start()
        elif open_braces:
            open_braces.pop()
    if end < 0:
        return text[begin:].split("$", 1)[0].strip()
    return text[begin:end] if box >= 0 else None
