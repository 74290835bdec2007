import numpy as np
import pytest

from pipeline.environments.dapo_math import READ, normalize
from pipeline.types import Prompt
from tests.environments.pooled import made

SAID = "So it is 34.\n\nAnswer: {}"


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("34", SAID.format("34"), True),
        ("34", SAID.format("$34$."), True),
        ("34", SAID.format("34."), False),  # the point stays, as in DAPO's code
        ("34", SAID.format("\\boxed{34}"), True),
        ("34", SAID.format("$x = 34$"), True),
        ("34", SAID.format("034"), False),
        ("34", SAID.format("35"), False),
        ("34", "\\boxed{34}", False),  # "Answer:" is missing
        ("34", "the ANSWER :34\nand that is all", True),
        ("34", "Answer: 34\nno, wait.\nAnswer: 35", False),  # the last counts
        ("34", "Answer: 34\n" + "x" * READ, False),  # too far from the end
        ("1002", SAID.format("1,002"), True),
        ("34", SAID.format("34 degrees"), True),
        ("\\frac{1}{2}", SAID.format("\\frac12"), True),
        ("\\frac{1}{2}", SAID.format("0.5"), False),  # formulas are not compared
    ],
)
def test_text_after_the_last_answer(expected: str, text: str, right: bool):
    environment = made("math", math_verify_impl="dapo_math_verify")
    outcome = environment.step(Prompt(0, np.zeros(1, np.int32), "m", {"answer": expected}), text)
    assert (outcome.reward, outcome.metrics) == (
        float(right),
        {"accuracy": float(right), "unparsed": outcome.metrics["unparsed"]},
    )
    assert bool(outcome.extracted) != bool(outcome.metrics["unparsed"])


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("a + b = \\sqrt2 \\text{ cm}", "\\sqrt{2}"),
        ("$12\\,345$", "12\\,345"),
        ("12,\\!345", "12345"),
        ("90^\\circ", "90"),
        ("\\textbf{7}", "7"),
        ("\\overline{ab}", "ab"),
        ("\\text{Monday}", "Monday"),
        ("it is $5$ or $6$", "5"),
        ("(1,\\ 2)", "(1,2)"),
    ],
)
def test_answers_are_normalized_before_comparison(answer: str, plain: str):
    assert normalize(answer) == plain
