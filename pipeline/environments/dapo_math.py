r"""Compare mathematical answers as DAPO's authors do: the text after the last "Answer:" must equal the expected answer.

Both texts are normalized and then compared character by character. This is fast. It suits data sets with integer answers whose
prompts ask for a last line "Answer: ...". The normal form is Minerva's (arXiv:2206.14858, appendix D.1) as DAPO uses it
(arXiv:2503.14476; `math_dapo` in verl, `dapo_math_verify` in NeMo-RL).

Leaves out: equality of two formulas, which `math.py` checks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.environments.environment import Environment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt

READ = 300  # characters at the end of the text; an earlier "Answer:" does not count
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""(Text, replacement) pairs, applied in this order before the texts in REMOVED are removed."""

WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds"
    " meters meals edges students childrentickets multiples"
)
REMOVED = (
    *WORDS.split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Texts that are removed, in this order: units and words of the question, their LaTeX forms, spaces and marks."""

UNWRAPPED = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),  # only the first formula
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),  # \frac12 is \frac{1}{2}
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


class DAPOMath(Environment):
    """Rewards an answer that equals `prompt.task["answer"]` with 1, else 0. Metric `unparsed`: 1 if the text has no answer."""

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        answers = ANSWER.findall(text[-READ:])
        extracted = normalize(answers[-1]) if answers else ""
        right = float(bool(answers) and extracted == normalize(prompt.task["answer"]))
        return Outcome(right, {"accuracy": right, "unparsed": float(not answers)}, extracted=extracted)


def normalize(answer: str) -> str:
    """Return the normal form of an answer, in which answers are compared."""
    answer = answer.split("=")[-1]
    for old, new in REPLACED:
        answer = answer.replace(old, new)
    for old in REMOVED:
        answer = answer.replace(old, "")
    for pattern, new in UNWRAPPED:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
