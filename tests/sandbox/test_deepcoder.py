"""Records in the forms of DeepCoder's data set become tasks that `kind: code` judges."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pipeline.types import Prompt
from recipes.processors.deepcoder import task
from tests.environments.pooled import made
from tests.sandbox.conftest import unusable

DOUBLE = "def double(x, y=0):\n    return {}\n"
METHOD = "class Solution:\n    def double(self, x, y=0):\n        return {}\n"
PROGRAM = "print({})"
RECORDS: dict[str, tuple[dict[str, Any], str, str, str]] = {  # form -> (columns, code, what is right, part of the prompt)
    "primeintellect, programs": (
        {"tests": [{"type": "stdin_stdout", "fn_name": None, "input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 4)]},
        PROGRAM,
        "2 * int(input())",
        "reads its input from stdin",
    ),
    "primeintellect, functions": (
        {"tests": [{"type": "function_call", "fn_name": "double", "input": [n, 0], "output": [2 * n]} for n in (1, 4)]},
        DOUBLE,
        "2 * x",
        "the Python function `double`",
    ),
    "taco, programs": ({"tests": {"inputs": ["1\n", "4\n"], "outputs": ["2.0\n", "8"]}}, PROGRAM, "2 * int(input())", "stdin"),
    "taco, functions": (
        {"tests": {"fn_name": "double", "inputs": [[1, 0], [4, 0]], "outputs": [[2], [8]]}},
        DOUBLE,
        "2 * x",
        "the Python function `double`",
    ),
    "lcbv5, programs": (
        {
            "tests": [{"input": f"{n}\n", "output": f"{2 * n}", "testtype": "stdin"} for n in (1, 4)],
            "starter_code": "",
            "metadata": {"func_name": None},
        },
        PROGRAM,
        "2 * int(input())",
        "stdin",
    ),
    "lcbv5, functions": (
        {
            "tests": [{"input": f"{n}\n[0]", "output": f"[{2 * n}, 0]", "testtype": "functional"} for n in (1, 4)],
            "starter_code": "class Solution:\n    def double(self, x: int, y: List[int]) -> List[int]:\n        ",
            "metadata": {"func_name": "double"},
        },
        METHOD,
        "[2 * x, *y]",
        "```python\nclass Solution:\n    def double(self, x: int, y: List[int]) -> List[int]:\n```",
    ),
    "codeforces": (
        {"tests": [{"input": f"{n}", "output": f"{2 * n}"} for n in (1, 4)]},
        PROGRAM,
        "2 * int(input())",
        "stdin",
    ),
}


@pytest.mark.parametrize("form", RECORDS)
def test_right_and_wrong_code(form):
    if reason := unusable():
        pytest.skip(reason)
    columns, code, right, asked = RECORDS[form]
    record = task({"problem": "Double it.", "solutions": [], **columns, "tests": json.dumps(columns["tests"])})
    assert record["input"].startswith("Double it.\n\n") and asked in record["input"]
    environment = made("code", timeout_s=60.0)
    environment.check_answer(record["output"], None)
    prompt = Prompt(0, np.zeros(1, np.int32), "code", {"answer": record["output"]})
    for body, reward in ((right, 1.0), (right.replace("2", "1 +", 1).replace("+ *", "+"), 0.0)):
        outcome = environment.step(prompt, f"So:\n```python\n{code.format(body)}\n```")
        assert outcome.reward == reward, (body, outcome)
