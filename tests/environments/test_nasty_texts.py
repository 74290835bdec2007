"""Texts that a policy might use to have its episode dropped: none makes a step raise or search forever."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.code import code_in
from pipeline.environments.code_tests import same_result
from pipeline.environments.environment import Environment
from pipeline.types import Prompt
from tests.environments.test_tools import hermes

CONFIGS = {
    "exact": EnvironmentConfig(kind="exact_match"),
    "dapo": EnvironmentConfig(kind="math", kwargs={"math_verify_impl": "dapo_math_verify"}),
    "english": EnvironmentConfig(kind="multiple_choice"),
    "multilingual": EnvironmentConfig(kind="multiple_choice", kwargs={"verifier_type": "multilingual_multichoice"}),
    "puzzle": EnvironmentConfig(kind="sliding_puzzle"),
    "marked": EnvironmentConfig(kind="calculator", kwargs={"judge": "exact", "open": "[", "close": "]"}),
    "hermes": EnvironmentConfig(kind="tools", kwargs={"judge": "exact", "tools": ["calculator"]}),
}
ANSWERS = {"english": "B", "multilingual": "B", "puzzle": "1 2 3/4 0 6/7 5 8"}
BEGINS = (
    "<action>",
    "answer is",
    "answer:",
    "Answer:",
    "\\boxed{",
    "\\boxed",
    "A",
    "[",
    "[0",
    "<code>",
    "```\n",
    "<tool_call>",
)
REPEATED = (" ", "\n", "a", ":", "(", "{", "[", "1", "-", "\u0327\u0301")
SHORT, LONG = 2_000, 40_000  # characters; a cubic search of the one, or a quadratic one of the other, takes
LIMIT_S = 2.0  # seconds of CPU: a linear search takes milliseconds
PIECES = (
    *("[", "]", "(", ")", "{", "}", "<action>", "</action>", "slide 1 2", "view", "<tool_call>", "</tool_call>", "<code>"),
    *("0x10", "0b1", "0o7", "1_0", "1j", "1e400", "1e99999999999999999999", "9" * 4400, "-", "**", "//", "%", "sqrt(", "abs("),
    *(
        "True",
        "...",
        "lambda:0",
        "1/0",
        "NaN",
        "\x00",
        "\r",
        "\f",
        "\u2028",
        "\u0663",
        "\u00b2",
        "\uff11",
        "'",
        "\\",
        "\\ud800",
    ),
    *("Answer:", "answer is ", "\\boxed{", "\\text{", "B", "$", "=", "```", "</code>", "</think>", "[[[[" * 500, '{"a":' * 500),
)


@pytest.fixture(scope="module")
def environments():
    built = build(CONFIGS, call_parser=hermes())
    yield built
    for environment in built.values():
        environment.close()


def step(environment: Environment, name: str, text: str) -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), name, {"answer": ANSWERS.get(name, "4")})
    environment.step(environment.reset(prompt), text)


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_no_text_makes_a_step_raise(environments):
    draw = random.Random(7)
    assert environments.keys() == CONFIGS.keys()
    for number in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "' + text + '"}}</tool_call>'
        written = (text, f"[{text}]", call, f"<action>{text}</action>", f"Answer: {text}")[number % 5]
        for name, environment in environments.items():
            try:
                step(environment, name, written)
            except Exception as error:
                pytest.fail(f"{name}: {written[:200]!r}: {error!r}")


@pytest.mark.parametrize("text", ["[0x10]", "[0b1]", "[0o7]", "[1e99999999999999999999]"])
def test_numbers_that_decimal_cannot_read(environments, text):
    step(environments["marked"], "marked", text)


def texts(length: int) -> list[str]:
    repeated = [begin * (length // len(begin)) for begin in BEGINS]
    return repeated + [begin + again * (length // len(again)) + "x" for begin in BEGINS for again in REPEATED]


@pytest.mark.parametrize("name", ["multilingual", "puzzle", "marked", "interpreter"])
def test_no_text_is_searched_forever(environments, name):
    interpreter = EnvironmentConfig(kind="code_interpreter", kwargs={"sandbox": "none"})  # no text here has a closed code block
    environment = environments.get(name) or build({name: interpreter})[name]
    assert len(texts(SHORT)) == len(texts(LONG)) == len(BEGINS) * (1 + len(REPEATED))
    for text in texts(SHORT) + texts(LONG):
        begun = time.thread_time()
        step(environment, name, text)
        assert time.thread_time() - begun < LIMIT_S, text[:20]


@pytest.mark.parametrize("texts", ["worst", pytest.param("all", marks=pytest.mark.full)])
def test_judges_read_long_texts_in_linear_time(texts: str):
    """By a limit of CPU time that only a search of quadratic time reaches."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.environments.long_texts", texts], cwd=Path(__file__).parents[2], check=False
    )
    assert ran.returncode == 0


def test_a_fence_is_not_searched_for_forever():
    assert len(texts(LONG)) == len(BEGINS) * (1 + len(REPEATED))
    for text in texts(LONG):
        begun = time.thread_time()
        code_in(text)
        assert time.thread_time() - begun < LIMIT_S, text[:20]


def test_an_answer_nested_too_deeply_is_wrong():
    assert not same_result("[" * 100_000, "[]")


def test_half_a_surrogate_pair_is_not_a_call():
    (call,) = hermes().parse('<tool_call>{"name": "python", "arguments": {"code": "\\ud800"}}</tool_call>').calls
    assert call.error and not call.arguments
