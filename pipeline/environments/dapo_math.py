r"""Mathematical answers, judged as DAPO's authors do: what follows the text's last "Answer:" must be the expected answer.

Both are first put in one form and then compared character by character: fast, and made for data sets whose answers are
integers and whose prompts ask for a last line "Answer: ...". The form is Minerva's (arXiv:2206.14858, appendix D.1) as DAPO has
it (arXiv:2503.14476; `math_dapo` in verl, `dapo_math_verify` in NeMo-RL).

Leaves out: whether two formulas are equal, which `math.py` judges.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.environments.base import Environment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt

READ = 300  # characters at the text's end; an "Answer:" before them does not count
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
"""In this order, before REMOVED."""

WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds"
    " meters meals edges students childrentickets multiples"
)
REMOVED = (
    *WORDS.split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""In this order: units and words of the question, then what LaTeX has of them, then spaces and marks."""

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
    """Reward 1 if the text's answer is `prompt.task["answer"]`, else 0."""

    def step(self, prompt: Prompt, text: str) -> Outcome:
        answers = ANSWER.findall(text[-READ:])
        right = float(bool(answers) and normal(answers[-1]) == normal(prompt.task["answer"]))
        return Outcome(right, {"accuracy": right})


def normal(answer: str) -> str:
    """Return the answer in the form in which it is compared."""
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
