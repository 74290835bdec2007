import json

import numpy as np
import pytest

from pipeline.environments.code import Code, CodeInterpreter, code_in
from pipeline.environments.code_tests import Case, read, same_output, same_result
from pipeline.types import Prompt
from tests.sandbox.conftest import works

LIMITS = {"wall_s": 10.0, "cpu_s": 2.0, "memory_bytes": 128 << 20, "processes": 4}
DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```\nThat is all."
PAIRS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4", "7"]}


@pytest.fixture(scope="module", autouse=True)
def _contained():
    if reason := works("auto"):
        pytest.skip(reason)


def judged(tests, text: str, **kwargs) -> tuple[float, dict[str, float]]:
    given = tests if isinstance(tests, str) else json.dumps(tests)
    outcome = Code(120.0, **{**LIMITS, **kwargs}).step(Prompt(7, np.zeros(1, np.int32), "code", {"answer": given}), text)
    assert outcome.observation is None
    return outcome.reward, outcome.metrics


def metrics(passed: float, **others: float) -> dict[str, float]:
    return {"accuracy": float(passed == 1), "passed": passed, "timeouts": 0.0, "memory": 0.0, "crashes": 0.0, **others}


def test_the_share_that_passes_and_all_or_nothing():
    assert judged(PAIRS, DOUBLE, reward="share") == (2 / 3, metrics(2 / 3))
    assert judged(PAIRS, DOUBLE) == (0.0, metrics(2 / 3))
    right = {"inputs": PAIRS["inputs"], "outputs": ["2", "4", "6"]}
    assert judged(right, DOUBLE) == (1.0, metrics(1.0))


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("while True: pass", {"timeouts": 1.0}),
        ("x = bytearray(1 << 30)", {"memory": 1.0}),
        ("1 / 0", {"crashes": 1.0}),
        ("print(3)", {}),
        pytest.param("this is no Python", {"crashes": 1.0}, marks=pytest.mark.long),
        pytest.param("print(2); raise SystemExit(1)", {"crashes": 1.0}, marks=pytest.mark.long),
    ],
)
def test_how_answers_fail(code: str, end: dict[str, float]):
    assert judged({"inputs": ["1"], "outputs": ["2"]}, code, cpu_s=0.3) == (0.0, metrics(0.0, **end))


@pytest.mark.long
def test_no_time_is_left():
    environment = Code(0.4, **LIMITS)
    outcome = environment.step(
        Prompt(0, np.zeros(1, np.int32), "code", {"answer": json.dumps(PAIRS)}), "import time; time.sleep(60)"
    )
    assert (outcome.reward, outcome.metrics["timeouts"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "code", ["def add(a, b): return a + b", "class Solution:\n  def add(self, a, b):\n    print('noise'); return a + b"]
)
def test_functions_are_called(code: str):
    tests = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
    assert judged(tests, code) == (1.0, metrics(1.0))
    assert judged({**tests, "outputs": [3, 4]}, code, reward="share") == (0.5, metrics(0.5))


def test_pieces_of_python():
    tests = ["assert f(1) == 2", "assert f(2) == 5", "assert f(3) == 4", "assert g() == 0"]
    assert judged(tests, "def f(x): return x + 1", reward="share") == (0.5, metrics(0.5))
    assert judged("from math import pi\nassert f(pi) > 4", "def f(x): return x + 1") == (1.0, metrics(1.0))


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)", "print('test 0'); print('0' * 32 + ' 0')"])
def test_an_answer_that_ends_before_its_tests_has_not_passed_them(code: str):
    assert judged(["assert f(1) == 2"], code)[0] == 0.0


def test_what_is_expected_is_nowhere_to_be_found():
    program = """
import os, sys
for folder, _, names in os.walk("/tmp"):
    for name in names:
        print(open(os.path.join(folder, name)).read())
print(open("/proc/self/environ").read(), sys.argv, sys.stdin.read())
"""
    environment = Code(60.0, **LIMITS)
    ran = environment._run(["answer.py"], program, "given", 30.0)
    assert ran.status == 0 and b"given" in ran.stdout and b"4711" not in ran.stdout
    assert judged({"inputs": ["given"], "outputs": ["4711"]}, program)[0] == 0.0


def test_the_code_of_a_text():
    assert code_in("```\na\n```\nor\n```python\nb\nc\n```\n") == "b\nc\n"
    assert code_in("a = 1") == "a = 1"
    assert code_in("```python\na") == "```python\na"  # cut before its end


def test_the_forms_of_tests():
    live = {"input": "1\n[2]", "output": "3", "testtype": "functional", "fn_name": "f"}
    assert read(json.dumps([live])).cases == (Case("[1, [2]]", "3", "f"),)
    assert read([{"input": "1", "output": "2"}]).cases == (Case("1", "2"),)
    assert read({"inputs": [["1", "2"]], "outputs": [["3"]]}).cases == (Case("1\n2", "3"),)
    assert read("[f(x) for x in y]").pieces == ("[f(x) for x in y]",)
    for wrong in ({"inputs": [1], "outputs": []}, [], {}, "", [{"input": "1", "output": "2", "testtype": "functional"}]):
        with pytest.raises(ValueError):
            read(wrong)
    assert same_output("a \nb\n\n", "a\nb") and not same_output("a b", "a\nb")
    assert same_result("3", "[3]") and same_result("[1]", "[1]") and not same_result("3 ", "4") and not same_result("x", "4")


def test_a_task_without_tests_is_an_error():
    with pytest.raises(ValueError, match="prompt 7: no tests"):
        judged("[]", DOUBLE)
    with pytest.raises(ValueError, match="not one of: all, share"):
        Code(1.0, reward="most")


def episode(**kwargs):
    environment = CodeInterpreter(60.0, **LIMITS, **kwargs)
    begun = environment.reset(Prompt(0, np.zeros(1, np.int32), "code", {"answer": "42"}))
    return environment, begun


def test_code_in_several_turns():
    environment, begun = episode()
    first = environment.step(begun, "I set <code>x = 6</code>")
    assert (first.reward, first.observation) == (0.0, {"role": "user", "content": "<result></result>"})
    failed = environment.step(begun, "<code>y\n</code>")
    assert failed.observation["content"] == "\n\n<result>\nline 1: NameError: name 'y' is not defined\n</result>"
    assert failed.metrics == {"accuracy": 0.0, "errors": 1.0}
    last = environment.step(begun, "<code>x * 7</code>")
    assert (last.reward, last.observation, last.metrics) == (1.0, None, {"accuracy": 1.0, "errors": 0.0})


@pytest.mark.long
def test_code_that_goes_on_after_a_value():
    environment, begun = episode(terminate_on_evaluation=False)
    told = environment.step(begun, "<code>40 + 2</code>")
    assert (told.reward, told.observation["content"]) == (0.0, "<result>42</result>")
    over = environment.step(begun, "It is 42.")
    assert (over.reward, over.observation) == (1.0, None)
