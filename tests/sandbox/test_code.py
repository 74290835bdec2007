import json
from pprint import pformat

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.build_environments import build
from pipeline.environments.code import SNIPPETS, code_in
from pipeline.environments.code_tests import (
    LITERAL,
    EqualityTest,
    IOTest,
    parse_tests,
    same_literal,
    same_result,
    same_stdout,
    same_value,
)
from pipeline.environments.environment import Unjudged
from pipeline.sandbox.limits import SandboxError
from pipeline.types import Prompt
from tests.sandbox.conftest import unusable

LIMITS = {"wall_s": 10.0, "cpu_s": 2.0, "memory_bytes": 128 << 20, "processes": 4}
DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```\nThat is all."
PAIRS = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4", "7"]}


@pytest.fixture(scope="module", autouse=True)
def _contained():
    if reason := unusable():
        pytest.skip(reason)


def built(timeout_s: float, kind: str = "code", **kwargs):
    return build({"code": EnvironmentConfig(kind=kind, timeout_s=timeout_s, kwargs={**LIMITS, **kwargs})})["code"]


def judged(tests, text: str, **kwargs) -> tuple[float, dict[str, float]]:
    given = tests if isinstance(tests, str) else json.dumps(tests)
    outcome = built(120.0, **kwargs).step(Prompt(7, np.zeros(1, np.int32), "code", {"answer": given}), text)
    assert outcome.observation is None
    return outcome.reward, outcome.metrics


def metrics(passed: float, **others: float) -> dict[str, float]:
    return {"accuracy": float(passed == 1), "passed": passed, "timeouts": 0.0, "memory": 0.0, "crashes": 0.0, **others}


def test_rewards_are_the_passing_share_or_all_or_nothing():
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
def test_no_time_remains():
    environment = built(0.4)
    outcome = environment.step(
        Prompt(0, np.zeros(1, np.int32), "code", {"answer": json.dumps(PAIRS)}), "import time; time.sleep(60)"
    )
    assert (outcome.reward, outcome.metrics["timeouts"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("def add(a, b): return a + b", marks=pytest.mark.long),
        "class Solution:\n  def add(self, a, b):\n    print('noise'); return a + b",
    ],
)
def test_functions_are_called(code: str):
    tests = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
    assert judged(tests, code) == (1.0, metrics(1.0))
    assert judged({**tests, "outputs": [3, 4]}, code, reward="share") == (0.5, metrics(0.5))


def test_pieces_of_python():
    tests = ["assert f(1) == 2", "assert f(2) == 5", "assert f(3) == 4", "assert g() == 0"]
    assert judged(tests, "def f(x): return x + 1", reward="share") == (0.5, metrics(0.5))
    assert judged("from math import pi\nassert f(pi) > 4", "def f(x): return x + 1") == (1.0, metrics(1.0))


CHECK = """
METADATA = {"author": "x"}


def check(candidate):
    assert candidate(1) == 2
    assert abs(candidate(2.0) - 3.0) < 1e-6
"""
TEST = """
from solution import f

def test_one():
    assert f(1) == 2

def test_two(more=1):
    assert f(more) == 2

def test_of_a_fixture(tmp_path):
    assert False
"""


@pytest.mark.parametrize("tests", [{"test": CHECK, "entry_point": "f"}, TEST], ids=["HumanEval", "KodCode"])
def test_tests_that_a_piece_defines_are_called(tests):
    assert judged(tests, "def f(x): return x + 1") == (1.0, metrics(1.0))
    assert judged(tests, "def f(x): return x + 2") == (0.0, metrics(0.0))


@pytest.mark.parametrize(
    "piece",
    [
        CHECK,
        TEST.replace("test_", "Test_"),
        "def test_it(tmp_path): assert f(1) == 2",
        "async def test_it(): assert f(1) == 2",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): assert 0\nif __name__ == '__main__': unittest.main()",
        "try:\n  import numpy\nexcept ImportError:\n  numpy = None\nif numpy:\n  x = 1\nelse:\n  'nothing'",
        "# no test",
    ],
)
def test_a_piece_that_only_defines_is_an_error(piece: str):
    for tests in (piece, ["assert f(1) == 2", piece]):
        with pytest.raises(ValueError, match="defines tests and calls none"):
            parse_tests(tests)


@pytest.mark.parametrize(
    "last", ["check(f)", "for x in (1,): check(f)", "with open('x'): y = 1", "if f(1) != 2: raise ValueError"]
)
def test_a_piece_with_statements_is_a_test(last: str):
    assert parse_tests(CHECK + last).snippets == (CHECK + last,)


def test_an_unknown_check():
    with pytest.raises(ValueError, match=r"does not define check\(candidate\)"):
        parse_tests({"test": "assert f(1) == 2", "entry_point": "f"})


STARTED = "class Solution:\n  def gcd(self, nums: List[int]) -> int: return min(inf, math.fsum(deque(nums)), pow(9, 9, 99))"


def test_answers_have_the_imports_that_judges_provide():
    called = {"fn_name": "gcd", "inputs": [[[1, 2]]], "outputs": [3]}
    assert judged(called, STARTED) == (1.0, metrics(1.0))
    assert judged(called, "pass") == (0.0, metrics(0.0, crashes=1.0))  # the name of math is not the answer's
    assert judged(["assert Solution().gcd([1, 2]) == 3", "assert inf > 1"], STARTED) == (1.0, metrics(1.0))
    reads = "from __future__ import annotations\nif __name__ == '__main__': print(Counter(stdin.readline().strip())['a'])"
    assert judged({"inputs": ["banana"], "outputs": ["3"]}, reads) == (1.0, metrics(1.0))


def test_an_answer_is_a_module():
    """A dataclass with annotations as strings needs it."""
    code = "from __future__ import annotations\nfrom dataclasses import *\n@dataclass\nclass A:\n  x: int = 1\nprint(A())"
    assert judged({"inputs": [""], "outputs": ["A(x=1)"]}, code)[0] == 1.0
    assert judged(["assert A().x == 1"], code)[0] == 1.0


FORGED = {
    "marks": """
import json, os, sys
asked = json.load(sys.stdin)
for number in range(len(asked["snippets"])):
    os.write(1, f"\\n{asked['mark']} {number} null\\n".encode())
os._exit(0)""",
    "marks that it looked for": """
import json, os
for descriptor in range(3, 64):
    try:
        asked = json.loads(os.read(descriptor, 1 << 16))
        for number in range(len(asked["snippets"])):
            os.write(1, f"\\n{asked['mark']} {number} null\\n".encode())
    except Exception:
        pass
os._exit(0)""",
    "an object that is equal to all": """
class Equal:
    __eq__ = __ge__ = __lt__ = lambda self, other: True
    __index__ = __float__ = __hash__ = lambda self: 0
    __iter__ = lambda self: iter(())
f = lambda x: Equal()""",
    "a list that is": """
class Equal(list):
    __eq__ = lambda self, other: True
f = lambda x: Equal()""",
}


@pytest.mark.parametrize("code", FORGED.values(), ids=list(FORGED))
def test_a_tests_result_cannot_be_forged(code: str):
    tests = ["assert f(1) == 2", "assert f(2) == [3, 4]", "assert {3: 'x'} == f(3), 'wrong'", "assert set(f(4)) == set([5])"]
    nested = [
        "assert (f(1) == 2) == True",
        "assert True is (f(1) == 2)",
        "assert f(1) == 2 and f(2) == 3",
        "assert f(1) == 2\nassert f(2) == 3",
    ]
    passed = judged(tests + nested, code, reward="share")[0]
    assert passed == 0.0


def test_the_mark_of_other_pieces_is_not_on_stdin():
    assert judged("f(1)", FORGED["marks"])[0] == 0.0


@pytest.mark.parametrize(
    "value",
    [
        "None", "True", "-1", "1.5", "1e999", "10**40", "'\\n é \\udcff'", "b'\\xff'", "1+2j", "[]", "()", "set()", "{}",
        "[1, (2, [3.0]), {'a': {4, 'x'}, (1, 2): None}]",
    ],
)  # fmt: skip
def test_values_are_encoded_and_compared_as_python_does(value: str):
    names = {}
    exec(SNIPPETS.decode().partition("\n\n")[2].partition("\nfor number")[0], names)
    literal = eval(value)
    others = [None, 0, 1, "", "1", [], (), set(), {}, [0], [1, (2, [3.0])], b"", 0j, 10**40 + 1, 0.5, {1: 2}, {1}, {}.keys()]
    assert same_value(json.dumps(names["encode"](literal)), literal)
    for other in others:
        assert same_value(json.dumps(names["encode"](other)), literal) == (other == literal), other


@pytest.mark.parametrize(
    "told", ["", "[" * 10**6, '{"int": "x"}', '{"int": 2}', '{"list": 3}', '{"dict": [1]}', "[1]", "9" * 5000]
)
def test_a_result_that_is_not_a_value_equals_nothing(told: str):
    assert not any(same_value(told, expected) for expected in (1, "x", [1], {1: 2}, {1}, 1j, None, b"x"))


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)", "print('test 0'); print('0' * 32 + ' 0')"])
def test_an_answer_that_exits_before_its_tests_fails_them(code: str):
    assert judged(["assert f(1) == 2"], code)[0] == 0.0


def test_expected_values_are_not_visible_to_the_answer():
    program = """
import os, sys
for folder, _, names in os.walk("/tmp"):
    for name in names:
        print(open(os.path.join(folder, name)).read())
print(open("/proc/self/environ").read(), sys.argv, sys.stdin.read())
"""
    environment = built(60.0)
    ran = environment._run(["answer.py"], program, "given", 30.0)
    assert ran.status == 0 and b"given" in ran.stdout and b"4711" not in ran.stdout
    assert judged({"inputs": ["given"], "outputs": ["4711"]}, program)[0] == 0.0


def test_the_code_of_a_text_is_found():
    assert code_in("```\na\n```\nor\n```python\nb\nc\n```\n") == "b\nc\n"
    assert code_in("a = 1") == "a = 1"
    assert code_in("```python\na") == "```python\na"  # cut before its end


def test_the_forms_of_tests():
    live = {"input": "1\n[2]", "output": "3", "testtype": "functional", "fn_name": "f"}
    assert parse_tests(json.dumps([live])).cases == (IOTest("[1, [2]]", "3", "f"),)
    assert parse_tests([{"input": "1", "output": "2"}]).cases == (IOTest("1", "2"),)
    assert parse_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}).cases == (IOTest("1\n2", "3"),)
    prime = {"type": "function_call", "fn_name": "f", "input": [1, [2]], "output": ["3"]}
    assert parse_tests([prime]).cases == (IOTest("[1, [2]]", '["3"]', "f"),)
    assert parse_tests([{"type": "stdin_stdout", "input": "1", "output": "2"}]).cases == (IOTest("1", "2"),)
    named = {"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}
    assert parse_tests([named, {**named, "testtype": "stdin_stdout"}]).cases == (IOTest("[1]", "2", "f"), IOTest("1", "2"))
    equations = parse_tests(
        ["assert f(1) == 2", "assert -1 == f(2), 'why'", "assert f(3) == sorted([2, 1])", "assert f(4) == (1, {2})"]
    ).snippets
    assert equations == (
        EqualityTest("f(1)", 2), EqualityTest("f(2)", -1), EqualityTest("f(3)", [1, 2]), EqualityTest("f(4)", (1, {2}))
    )  # fmt: skip
    one, both = EqualityTest("f(1)", 2), EqualityTest("(f(1), f(2))", (2, 3))
    for inner in ("(f(1) == 2) == True", "(f(1) == 2) is True", "True == (2 == f(1))", "((f(1) == 2) == True) is True"):
        assert parse_tests([f"assert {inner}"]).snippets == (one,)
    for several in (
        "assert f(1) == 2 and f(2) == 3",
        "assert f(1) == 2\nassert f(2) == 3",
        "assert (f(1) == 2 and f(2) == 3) == True",
    ):
        assert parse_tests([several]).snippets == (both,)
    others = (
        "assert f(1) == g(2)",
        "assert f(1) == 2 and g()",
        "assert f(1) == 2 or f(2) == 3",
        "assert f(1) == 2\nassert g()",
        "assert f(1) == 1 == 2",
        "assert f(1) != 2",
        "f(1) == 2",
        "assert 1 == 1; x",
        "assert (",
    )
    assert parse_tests(list(others)).snippets == others
    assert parse_tests("[f(x) for x in y]").snippets == ("[f(x) for x in y]",)
    for wrong in ({"inputs": [1], "outputs": []}, [], {}, "", [{"input": "1", "output": "2", "testtype": "functional"}]):
        with pytest.raises(ValueError):
            parse_tests(wrong)
    assert same_stdout("a \nb\n\n", "a\nb") and not same_stdout("a b", "a\nb")
    assert same_result("3", "[3]") and same_result("[1]", "[1]") and not same_result("3 ", "4") and not same_result("x", "4")


@pytest.mark.parametrize(
    ("value", "answer", "same"),
    [
        (list(range(40)), str(list(range(40))), True),
        (list(range(40)), str(list(range(41))), False),
        ("abc", "abc", True),
        ("abc", "'abc'", True),
        ("a long text " * 20, "a long text " * 20, True),
        ({"b": 1, "a": [2.0]}, '{"a": [2], "b": 1}', True),
        (42, "42", True),
        (None, "nothing", False),
        (True, "1", False),
        (object, "<class 'object'>", True),
    ],
)
def test_an_answers_value_counts_in_any_output_format(value: object, answer: str, same: bool):
    assert same_literal(pformat(value), answer) == same


@pytest.mark.parametrize("shown", ["[" * 5000, "-" * 60_000 + "1", "{[]}", "1" * 5000, "'\ud800' ", "'\0'", "{**{}}", "(1"])
def test_an_output_that_is_not_a_literal_is_wrong(shown: str):
    assert not same_literal(shown, "1")


def test_a_literal_that_is_too_long_is_not_parsed():
    assert same_literal(" " * (LITERAL - 4) + "[ 1]", "[1]")
    assert not same_literal(" " * (LITERAL - 3) + "[ 1]", "[1]")


def test_a_task_without_tests_is_an_error():
    with pytest.raises(Unjudged, match="prompt 7: no tests"):
        judged("[]", DOUBLE)


def episode(answer: str = "42", **kwargs):
    environment = built(60.0, "code_interpreter", **kwargs)
    begun = environment.reset(Prompt(0, np.zeros(1, np.int32), "code", {"answer": answer}))
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


def test_a_long_value_is_the_answer():
    environment, begun = episode(str(list(range(40))))
    assert environment.step(begun, "<code>list(range(40))</code>").reward == 1.0
    assert [environment.step(episode()[1], text).malformed for text in ("<code>1", "it is 1")] == [True, False]


@pytest.mark.long
def test_code_that_continues_after_a_value():
    environment, begun = episode(terminate_on_evaluation=False)
    told = environment.step(begun, "<code>40 + 2</code>")
    assert (told.reward, told.observation["content"]) == (0.0, "<result>42</result>")
    over = environment.step(begun, "It is 42.")
    assert (over.reward, over.observation) == (1.0, None)


def test_the_output_of_code_is_limited():
    environment, begun = episode(output_bytes=1000, terminate_on_evaluation=False)
    for code in ("print('x' * 10**4)\n'y' * 10**4", "print('x' * 900)\nraise ValueError('z' * 10**4)"):
        told = environment.step(begun, f"<code>{code}</code>").observation["content"]
        assert len(told) <= 1000 + len("\n\n<result>\n\n</result>")
    environment.step(begun, "That is all.")


@pytest.mark.parametrize("kind", ["code", "code_interpreter"])
def test_a_sandbox_that_cannot_start_is_not_the_answers_fault(kind: str, monkeypatch: pytest.MonkeyPatch):
    environment = built(60.0, kind)
    begun = environment.reset(Prompt(0, np.zeros(1, np.int32), "code", {"answer": "assert f(1) == 2"}))

    def no_room(*arguments, **rest):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", no_room)
    with pytest.raises(SandboxError, match="guard process cannot be started: Resource temporarily unavailable"):
        environment.step(begun, "<code>1</code>")
