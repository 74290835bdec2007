"""Each scoring rule against answers made by hand: right, wrong, without an answer, cut, and misleading."""

import contextlib
import json
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.environments.environment import Environment, Outcome
from pipeline.environments.minerva_math import MinervaMath, final_answer
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.evaluation.lm_eval_golden import GOLDEN

NOTHING = None  # no answer is found


def judge(environment: Environment, expected: str, text: str) -> Outcome:
    return environment.step(Prompt(0, np.zeros(1, np.int32), "rule", {"answer": expected}), text)


def assert_judged(outcome: Outcome, right: bool | None, metric: str = "accuracy") -> None:
    """Assert whether an answer is right; NOTHING: none is found."""
    assert outcome.metrics[metric] == float(right is True)
    assert outcome.metrics["unparsed"] == float(right is NOTHING)
    if right is NOTHING:
        assert not outcome.extracted


GSM8K = [  # expected, text, flexible, strict
    ("72", "48 / 2 = 24 and 48 + 24 = 72.\n#### 72", True, True),
    ("72", "She sold 72 clips.", True, False),
    ("72", "#### 72.", True, True),
    ("1,080", "He earns $1080.\n#### 1080", True, True),
    ("1080", "#### 1,080", True, True),
    ("1080", "It costs $1,080.", True, False),
    ("-5", "#### -5", True, True),
    ("18", "$18", True, False),
    ("72", "#### 71", False, False),
    ("72", "I count 27.", False, False),
    ("18", "#### 18.00", False, False),  # compared as texts
    ("72", "#### 72 clips, of 100", False, True),  # the last number counts for one, the marked one for the other
    ("72", "#### 71\n#### 72", True, False),  # the first marked one counts
    ("72", "#### 72\nQuestion: Ann has 3 apples", False, True),  # it goes on with another question
    ("72", "so the answer is \\boxed{72}", True, False),
    ("72", "the answer is 72 ... no, 73", False, False),
    ("72", "I am sure it is not 72", True, False),  # the rule reads no words
    ("72", "seventy-two", NOTHING, False),
    ("72", "", NOTHING, False),
    ("72", "####", NOTHING, False),
    ("72", "48 / 2 = 24 and then 48 +", False, False),  # cut
    ("72", "#### 7", False, False),  # cut
    ("72", "<think>it is 72</think>", True, False),
    ("72", "\uff17\uff12", NOTHING, False),  # full-width digits
    ("72", "\u0667\u0662", NOTHING, False),  # Arabic digits
    ("72", "####72", True, False),
    ("72", "#### $72", True, False),
    ("3", "...", False, False),  # the rule takes points as a number
]


@pytest.mark.parametrize(("expected", "text", "flexible", "strict"), GSM8K)
def test_gsm8k(expected: str, text: str, flexible: bool | None, strict: bool):
    outcome = judge(made("gsm8k"), expected, text)
    assert_judged(outcome, flexible, "flexible_extract")
    assert outcome.metrics["strict_match"] == float(strict)
    assert outcome.reward == outcome.metrics["accuracy"] == outcome.metrics["flexible_extract"]


@pytest.fixture(scope="module")
def minerva() -> Iterator[MinervaMath]:
    """Return the environment minerva_math, whose accuracy is that of `math`."""
    with contextlib.closing(made("minerva_math", 60.0, 1)) as environment:
        yield environment


MATH = [  # expected, text, right
    ("42", "So \\boxed{42}.", True),
    ("\\frac{1}{2}", "\\boxed{0.5}", True),
    ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", True),
    ("\\frac{1}{2}", "\\boxed{\\frac12}", True),
    ("\\sqrt{2}", "$\\boxed{2^{1/2}}$", True),
    ("(1,2)", "\\boxed{(1, 2)}", True),
    ("[2,5)", "The domain is $\\boxed{[2,5)}$", True),
    ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
    ("10\\%", "\\boxed{10\\%}", True),
    ("1002", "the answer is 1,002.", True),
    ("x^2+1", "\\boxed{1+x^2}", True),
    ("204", "**Answer: 204**", True),
    ("42", "\\boxed{41}", False),
    ("42", "\\boxed{-42}", False),
    ("(1,2)", "\\boxed{(2,1)}", False),
    ("x^2+1", "\\boxed{x^2-1}", False),
    ("42", "$\\boxed{41}$. But then the answer is $\\boxed{42}$.", True),  # the last
    ("42", "$\\boxed{42}$. But then the answer is $\\boxed{41}$.", False),
    ("42", "\\boxed{41}, no, \\boxed{42}", False),  # math-verify reads boxes beside each other as a set
    ("42", "the answer is 42 ... no, 41", True),  # only what is called the answer counts
    ("42", "I do not know", NOTHING),
    ("42", "", NOTHING),
    ("42", "\\boxed{4", NOTHING),  # cut
    ("42", "First we compute 6 times 7, which", False),  # cut
    ("42", "<think>I guess 42</think> \\boxed{41}", False),
    ("42", "\\boxed{\uff14\uff12}", False),  # full-width digits
    ("42", "\\boxed{forty-two}", False),
]


@pytest.mark.parametrize(("expected", "text", "right"), MATH)
def test_math(minerva: MinervaMath, expected: str, text: str, right: bool | None):
    outcome = judge(minerva, expected, text)
    assert_judged(outcome, right)
    assert outcome.reward == float(right is True)


SAID = "Final Answer: The final answer is {}. I hope it is correct."
MINERVA = [  # expected, text, right by Minerva's rule; NOTHING: without its words
    ("[2,5)", SAID.format("$[2,5)$"), True),
    ("24", SAID.format("$24$"), True),
    ("24", SAID.format("24"), True),
    ("24", SAID.format("$x = 24$"), True),
    ("24", SAID.format("24 dollars"), True),
    ("24", SAID.format("\\$24"), True),
    ("24", SAID.format("\\boxed{24}"), True),
    ("24\\text{ cm}", SAID.format("$24$ cm"), True),
    ("1000", SAID.format("$1,000$"), True),
    ("0,1", SAID.format("$0,1$"), True),
    ("\\frac{1}{2}", SAID.format("$\\frac12$"), True),
    ("\\frac{1}{2}", SAID.format("$0.5$"), True),  # by math-verify
    ("\\sqrt{2}", SAID.format("$\\sqrt2$"), True),
    ("\\left(3,\\frac{\\pi}{2}\\right)", SAID.format("$\\left( 3, \\frac{\\pi}{2} \\right)$"), True),
    ("24", "so 24.\nFinal Answer: The final answer is $24$. ", True),  # cut by the stop string "I hope"
    ("24", SAID.format("$25$"), False),
    ("24", SAID.format(""), False),
    ("24", SAID.format("24") + "\n" + SAID.format("25"), True),  # the first counts
    ("24", SAID.format("25") + "\n" + SAID.format("24"), False),
    ("24", SAID.format("not 24 but 25"), False),
    ("24", "The answer is \\boxed{24}.", NOTHING),
    ("24", "The final answer is 24. I hope it is correct.", NOTHING),
    ("24", "Final Answer: The final answer is $2", NOTHING),  # cut
    ("24", "", NOTHING),
    ("24", SAID.format("\uff12\uff14"), False),  # full-width digits
]


@pytest.mark.parametrize(("expected", "text", "right"), MINERVA)
def test_minerva(minerva: MinervaMath, expected: str, text: str, right: bool | None):
    metrics = judge(minerva, expected, text).metrics
    assert metrics["exact_match"] == float(right is True)
    assert metrics["no_final_answer"] == float(right is NOTHING)


@pytest.mark.parametrize("end", ["", "!", ".\nQuestion:"])
def test_minervas_last_sentence_may_end_otherwise(end: str):
    """As in lm-evaluation-harness, whose regular expression has a dot there."""
    assert final_answer(SAID.format("$24$").removesuffix(".") + end) == "24"


def test_minerva_scores_as_lm_evaluation_harness(minerva: MinervaMath):
    found = json.loads(GOLDEN.read_text())["minerva_math"]["scores"]
    for expected, text, exact_match, math_verify in found:
        metrics = judge(minerva, expected, text).metrics
        assert (metrics["exact_match"], metrics["accuracy"]) == (exact_match, math_verify), text
    assert len(found) == len(MATH) + len(MINERVA)


LETTER = [  # expected, text, right; of four choices
    ("B", "Think.\nAnswer: B", True),
    ("B", "**Answer: B**", True),
    ("B", "Answer: (b)", True),
    ("B", " B", True),
    ("B", "(B).", True),
    ("B", "the best answer is B", True),
    ("B", "The correct answer is $\\boxed{B}$.", True),
    ("B", "so \\boxed{\\text{B}}", True),
    ("B", "Answer: A\n\nWait.\n\nAnswer: B", True),  # the last
    ("B", "Answer: C", False),
    ("B", "Answer: B ... no.\nAnswer: A", False),
    ("B", "\\boxed{B}, I mean \\boxed{A}", False),
    ("B", "Answer: A\nIt cannot be B", False),
    ("B", "the answer is A ... no, B", False),  # only what is called the answer counts
    ("C", "I am sure it is not C", NOTHING),
    ("C", "The answer is not C", NOTHING),
    ("B", "A or B", NOTHING),
    ("A", "The answer is a bit unclear", NOTHING),
    ("B", "Because of the reasons above", NOTHING),
    ("B", "", NOTHING),
    ("B", "Step 1: the energy of", NOTHING),  # cut
    ("B", "Answer:", NOTHING),  # cut
    ("B", "Answer: E", NOTHING),  # there are four
    ("B", "<think>Answer: B</think> I cannot say", NOTHING),  # in the thinking alone
    ("B", "<think>Answer: A</think>Answer: B", True),
    ("B", "Answer: \uff22", True),  # full-width
    ("B", "Answer: \u0412", NOTHING),  # the Cyrillic letter
    ("B", "Answer: 2", NOTHING),
]


@pytest.mark.parametrize(("expected", "text", "right"), LETTER)
def test_letters(expected: str, text: str, right: bool | None):
    assert_judged(judge(made("multiple_choice", choices=4), expected, text), right)


TEN_LETTERS = [  # expected, text, right; of ten choices
    ("J", "Thus the answer is (J).", True),
    ("J", "the answer is J", True),
    ("I", "The answer is (I).", True),
    ("I", "Answer: I", True),
    ("I", "\\boxed{I}", True),
    ("E", "Answer: E", True),
    ("H", "The answer is **(H)**", True),
    ("J", "j", True),
    ("A", "The answer is (J). No: the answer is (A).", True),
    ("J", "the answer is (A)", False),
    ("J", "The answer is (I).", False),
    ("J", "The answer is (J). Question:\nThe answer is (B).", False),  # it goes on with another question
    ("I", "The answer is (A), I think", False),
    ("J", "Answer: K", NOTHING),  # beyond ten
    ("I", "I think that the pressure rises", NOTHING),  # the pronoun
    ("I", "The answer is I think unclear", True),  # the rule cannot know a pronoun there
    ("J", "Answer: Just ask", NOTHING),
    ("J", "Options A to J are all possible", NOTHING),
    ("J", "", NOTHING),
    ("J", "We begin with the law of", NOTHING),  # cut
    ("J", "The answer is (", NOTHING),  # cut
    ("J", "<think>the answer is (J)", True),  # cut while thinking: there is no end by which to know it
    ("J", "The answer is (\uff2a).", True),  # full-width
]


@pytest.mark.parametrize(("expected", "text", "right"), TEN_LETTERS)
def test_ten_letters(expected: str, text: str, right: bool | None):
    assert_judged(judge(made("multiple_choice", choices=10), expected, text), right)


EXACT = [  # expected, text, right; the last number
    ("132", "132", True),
    ("132", "it is 132", True),
    ("132", "132.", True),
    ("132", "1 then 132", True),
    ("132", "so 7+125=132", True),
    ("132", "(132)", True),
    ("132", "132 apples", True),
    ("132", " 132\n", True),
    ("132", "131", False),
    ("132", "0132", False),
    ("132", "13 2", False),
    ("132", "1,32", False),
    ("132", "132 then 1", False),
    ("132", "132 ... no, 133", False),
    ("132", "-132", True),  # the pattern has no sign
    ("132", "<think>132</think> 131", False),
    ("132", "not 132", True),  # the rule reads no words
    ("132", "13", False),  # cut
    ("132", "", NOTHING),
    ("132", "one hundred", NOTHING),
    ("132", "\uff11\uff13\uff12", NOTHING),  # full-width digits
]


@pytest.mark.parametrize(("expected", "text", "right"), EXACT)
def test_exact_match(expected: str, text: str, right: bool | None):
    assert_judged(judge(made("exact_match", pattern="[0-9]+"), expected, text), right)


@pytest.mark.parametrize("cases", [GSM8K, MATH, MINERVA, LETTER, TEN_LETTERS, EXACT])
def test_there_are_enough_cases_of_each_outcome(cases: list[tuple]):
    assert len(cases) >= 20 and {case[2] for case in cases} == {True, False, NOTHING}
