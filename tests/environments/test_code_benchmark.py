"""Answers to the code benchmarks are judged right, and an answer that attacks its judge is wrong and harms nothing."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments import numpy_stand_in
from pipeline.environments.build_environments import build
from pipeline.environments.code_benchmark import decode_private, read_cases, same_result, same_stdout
from pipeline.environments.code_process import NotPlain, decode, encode, free_names
from pipeline.environments.environment import Unjudged
from pipeline.evaluation.formats.programming import MBPP, HumanEval, LiveCodeBench, LiveCodeBenchArguments, StyleArguments
from pipeline.types import Prompt
from tests.environments.code_cases import (
    AREA_CASES,
    FUNCTION_CASES,
    HUMANEVAL_CASES,
    RIGHT,
    STDIN_CASES,
    WRONG,
    fenced,
)
from tests.environments.hostile_code import ANSWERS, HOSTILE
from tests.evaluation.code_records import HUMANEVAL, LIVE, LIVE_RIGHT, encoded
from tests.evaluation.code_records import MBPP as MBPP_RECORDS
from tests.sandbox.conftest import unusable

LIMITS = {"wall_s": 20.0, "cpu_s": 3.0, "memory_bytes": 256 << 20, "test_s": 6.0}
SETS = {
    **{name: (HumanEval(StyleArguments()), record) for name, record in HUMANEVAL.items()},
    **{name: (MBPP(StyleArguments()), record) for name, record in MBPP_RECORDS.items()},
    **{name: (LiveCodeBench(LiveCodeBenchArguments()), record) for name, record in LIVE.items()},
}
"""Name -> (format, record)."""
NAMES = {
    "humaneval": "root", "humaneval_plus": "means", "mbpp": "area", "mbpp_full": "depth", "mbpp_plus": "shared",
    "stdin": "", "functional": "append",
}  # fmt: skip


@pytest.fixture(scope="module")
def environment():
    if reason := unusable():
        pytest.skip(reason)
    return build({"code": EnvironmentConfig(kind="code_benchmark", timeout_s=60.0, kwargs=LIMITS)})["code"]


def judged(environment, task: dict, text: str) -> dict[str, float]:
    """Return the metrics that are not 0."""
    outcome = environment.step(Prompt(3, np.zeros(1, np.int32), "code", task), text)
    assert outcome.observation is None and outcome.reward == outcome.metrics["accuracy"]
    return {name: value for name, value in outcome.metrics.items() if value}


def task_of(name: str) -> dict:
    form, record = SETS[name]
    return form.question(record, 0).task


def right(name: str) -> str:
    record = SETS[name][1]
    if name in LIVE:
        return LIVE_RIGHT[name]
    return record["code"] if name in MBPP_RECORDS else record["prompt"] + record["canonical_solution"]


@pytest.mark.parametrize("name", SETS)
def test_a_known_good_answer_passes(environment, name: str):
    assert judged(environment, task_of(name), fenced(right(name))) == RIGHT


def test_a_function_may_have_the_name_of_a_built_in_one(environment):
    code = "def sum(a, b):\n    return a * b"
    record = {**MBPP_RECORDS["mbpp_full"], "code": code, "test_list": ["assert sum(10, 15) == 150"], "test_setup_code": ""}
    assert judged(environment, MBPP(StyleArguments()).question(record, 0).task, fenced(code)) == RIGHT


@pytest.mark.parametrize("style", ["instruct", "completion"])
def test_a_continued_function_passes(environment, style: str):
    task = HumanEval(StyleArguments(style)).question(HUMANEVAL["humaneval"], 0).task
    body = HUMANEVAL["humaneval"]["canonical_solution"]
    assert judged(environment, task, body + "```\nIt works:\n```python\nroot([1, 2])\n```") == RIGHT
    assert judged(environment, task, body.replace("-", "+")) == WRONG


# ---- cases of each rule ------------------------------------------------------------------------------------------------------


CASES = {
    **{f"humaneval_plus: {what}": ("humaneval_plus", *case) for what, case in HUMANEVAL_CASES.items()},
    **{f"stdin: {what}": ("stdin", fenced(code), result) for what, (code, result) in STDIN_CASES.items()},
    **{f"functional: {what}": ("functional", fenced(code), result) for what, (code, result) in FUNCTION_CASES.items()},
    **{f"mbpp: {what}": ("mbpp", fenced(code), result) for what, (code, result) in AREA_CASES.items()},
}


@pytest.mark.full
@pytest.mark.parametrize("what", CASES)
def test_cases_of_each_rule(environment, what: str):
    name, text, result = CASES[what]
    found = judged(environment, task_of(name), text)
    assert found.get("accuracy", 0.0) == result.get("accuracy", 0.0)
    assert {key: value for key, value in result.items() if value} in ({}, found)
    assert found.get("unparsed", 0.0) == result.get("unparsed", 0.0)


def test_each_rule_has_twenty_cases():
    assert min(map(len, (HUMANEVAL_CASES, STDIN_CASES, FUNCTION_CASES, AREA_CASES))) >= 20


# ---- hostile answers ---------------------------------------------------------------------------------------------------------


QUICK = {("exits with 0", "humaneval"), ("writes a verdict to each descriptor", "mbpp_plus"), ("kills its parent", "stdin")}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in QUICK else pytest.mark.full, id=f"{name}: {what}")
        for what in HOSTILE
        for name in ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "stdin", "functional")
    ],
)
def test_a_hostile_answer_is_wrong(environment, what: str, name: str, tmp_path: Path):
    wrong = f"\ndef {NAMES[name]}(*given, **named):\n    return 4711\n" if NAMES[name] else "\nprint(4711)\n"
    _harmless(environment, name, HOSTILE[what] + wrong, tmp_path)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) == ("returns what equals all", "humaneval") else pytest.mark.full)
        for what in ANSWERS
        for name in ("humaneval", "humaneval_plus", "mbpp", "mbpp_full", "mbpp_plus", "functional")
    ],
)
def test_a_hostile_result_is_wrong(environment, what: str, name: str, tmp_path: Path):
    _harmless(environment, name, ANSWERS[what].replace("{name}", NAMES[name]), tmp_path)


def _harmless(environment, name: str, code: str, folder: Path) -> None:
    """Judge a hostile answer as wrong, and check that no process or file of it is left, and that the judge works on."""
    (folder / "witness").write_text("unchanged")
    before = set(os.listdir("/tmp"))
    running = _running()  # other tests' sandboxes
    assert "accuracy" not in judged(environment, task_of(name), fenced(code))
    assert not _running() - running
    assert (folder / "witness").read_text() == "unchanged"
    assert not [new for new in set(os.listdir("/tmp")) - before if new.startswith(("stdout", "answer"))]


def _running() -> set[str]:
    """Return the ids of sandboxes that this process started and that still run."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {child for child in children if "guard.main" in _line(child)}


def _line(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# ---- tests that cannot run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param({"program": "assert f(", "setup": "", "entry_point": ""}, marks=pytest.mark.full),
        pytest.param({"program": "import nowhere\nassert f(1)", "setup": "", "entry_point": ""}, marks=pytest.mark.full),
        pytest.param({"program": "assert f(1)", "setup": "1 / 0", "entry_point": "f"}, marks=pytest.mark.full),
        pytest.param({"program": "assert f(lambda x: x)", "setup": "", "entry_point": ""}, marks=pytest.mark.full),
        {"tests": [], "private": "", "function": ""},
        {"tests": [{"input": "1"}], "private": "", "function": ""},
        {"tests": [], "private": "no base64", "function": ""},
        {"unknown": 1},
    ],
)
def test_tests_that_cannot_run_are_not_the_answers_fault(environment, tests: dict):
    with pytest.raises(Unjudged, match="prompt 3: "):
        judged(environment, {"answer": json.dumps(tests)}, fenced("def f(x): return x"))


@pytest.mark.full
def test_an_answer_that_raises_an_import_error_is_wrong(environment):
    assert judged(environment, task_of("mbpp"), fenced("import nowhere\ndef area(r): return r")) == WRONG


# ---- parts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 2", "1 2\n", True),
        (" 1 \n2 ", "1\n2", True),
        ("1.0", "1", True),
        ("1e0 2", "1 2.00", True),
        ("1\n\n2", "1\n\n2", True),
        ("", "", True),
        ("YES", "YES", True),
        ("0.1", "0.10", True),
        ("-0", "0", True),
        ("1 2", "12", False),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("1", "2", False),
        ("", "1", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333", "0.33333", False),
        ("nan", "NaN", False),
        ("sNaN", "1", False),
        ("1 x", "1.0 x", False),
        ("1e999999999", "1", False),
        ("1" * 5000, "1" * 5000, True),
        ("1,2", "1, 2", False),
    ],
)
def test_outputs_are_compared_by_lines_and_decimals(printed: str, expected: str, same: bool):
    assert same_stdout(printed, expected) == same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        ((1, 2), [1, 2], True),
        ([(1, 2)], [[1, 2]], False),
        (1, 1.0, True),
        (True, 1, True),
        ([], [], True),
        ({"a": 1}, {"a": 1}, True),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (None, None, True),
        ([1, 2], [2, 1], False),
        (0, False, True),
        ([[1], [2]], [[1], [2]], True),
        ("ab", "ab", True),
        (2**70, 2**70, True),
        (0.1 + 0.2, 0.3, False),
        (None, [], False),
        (range(3), [0, 1, 2], False),
        (b"a", "a", False),
        ({1: 2}, {"1": 2}, False),
        ([1], 1, False),
    ],
)
def test_results_are_compared_as_python_does(result, expected, same: bool):
    assert same_result(json.loads(json.dumps(encode(result, id))), expected) == same


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        2**70,
        1.5,
        float("inf"),
        "é\n",
        b"\xff",
        1 + 2j,
        [],
        (),
        set(),
        {},
        frozenset({1}),
        range(1, 9, 2),
        [1, (2, [3.0]), {"a": {4, "x"}, (1, 2): None}],
    ],
)
def test_values_pass_between_processes(value):
    passed = decode(json.loads(json.dumps(encode(value, id))), lambda number: None)
    assert passed == value and type(passed) is type(value)


def test_subclasses_lose_their_methods():
    class Equal(list):
        __eq__ = lambda self, other: True  # noqa: E731
        __hash__ = None

    assert encode(Equal([1]), id) == {"list": [1]}

    def refuse(value):
        raise NotPlain

    with pytest.raises(NotPlain):
        encode([object()], refuse)


def test_names_that_tests_leave_to_the_answer():
    program = "import math\nfrom copy import deepcopy as dc\ndef check(c):\n    return helper(c, [x for x in y])\n"
    program += "assert f(dc(1)) == math.pi"
    assert free_names(program, ()) == {"helper", "y", "f"}
    assert free_names(program, {"helper"}) == {"y", "f"}
    assert free_names("class A:\n    z = g(1)\nprint(len(A.z), __name__)", ("__name__",)) == {"g"}


def test_private_tests_are_read_without_unpickling():
    cases = [{"input": "1", "output": "2", "testtype": "stdin"}]
    assert decode_private(encoded(cases)) == decode_private(json.dumps(cases)) == cases
    assert read_cases({"tests": cases, "private": encoded(cases)}) == cases * 2
    import base64
    import pickle
    import zlib

    class Evil:
        def __reduce__(self):
            return os.mkdir, ("/tmp/unpickled-by-mistake",)

    for content in (Evil(), ["[]", "[]"], 1, {"a": "[]"}):
        with pytest.raises(ValueError, match="pickle"):
            decode_private(base64.b64encode(zlib.compress(pickle.dumps(content))).decode())
    assert not os.path.exists("/tmp/unpickled-by-mistake")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol))).decode()
        assert decode_private(packed) == cases


def test_numpys_comparison():
    for value, expected in (
        (1.0, 1.0 + 1e-9),
        (1, 1.1),
        ([1.0, 2.0], (1.0, 2.0)),
        ([1.0], [1.0 + 1e-6]),
        (float("nan"), float("nan")),
        (float("inf"), 1.0),
        (float("inf"), float("inf")),
        ([[1.0], [2.0]], [[1.0], [2.0 + 1e-7]]),
        (1e10, 1e10 + 1),
        (0.0, 1e-7),
        (1j, 1j + 1e-9),
        (True, 1.0),
    ):
        for limits in ({}, {"rtol": 1e-7, "atol": 1e-6}):
            same = bool(np.allclose(value, expected, **limits))
            assert numpy_stand_in.allclose(value, expected, **limits) == same, (value, expected)
    assert not numpy_stand_in.allclose([1.0], [1.0, 1.0])
    with pytest.raises(TypeError):
        numpy_stand_in.allclose([1.0], 1.0)
    with pytest.raises(AssertionError):
        numpy_stand_in.testing.assert_allclose(1.0, 2.0)
    assert numpy_stand_in.can_stand_in("import numpy as np\nnp.allclose(1, np.float64)")
    for program in ("import numpy as np\nnp.array([1])", "from numpy import *", "import numpy.linalg"):
        assert not numpy_stand_in.can_stand_in(program)
