"""Records with the columns of the code data sets on the Hub, made by hand, with a right and a wrong answer to each."""

import base64
import json
import pickle
import zlib

HELPED = {
    "task_id": "HumanEval/900",
    "prompt": "import math\nfrom typing import List\n\n\ndef poly(xs: List[float], x: float):\n"
    '    """ Evaluate a polynomial at x. """\n'
    "    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\n\ndef root(xs: List[float]):\n"
    '    """ Find x such that poly(xs, x) = 0, for a line.\n    >>> root([1, 2])\n    -0.5\n    """\n',
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    import copy\n    for xs in ([1, 2], [-6.0, 1.5], [0.1, 3]):\n"
    "        found = candidate(copy.deepcopy(xs))\n        assert abs(poly(xs, found)) < 1e-4\n",
    "entry_point": "root",
}
PLUS_TEST = """

import numpy as np

def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"

"""
"""The comparison that tests of HumanEval+ and MBPP+ begin with."""
MEANS = {
    "task_id": "HumanEval/901",
    "prompt": "from typing import List, Tuple\n\n\ndef means(xs: List[float]) -> Tuple[float, float]:\n"
    '    """ Return the mean and the mean of squares.\n    >>> means([1, 3])\n    (2.0, 5.0)\n    """\n',
    "canonical_solution": "    return sum(xs) / len(xs), sum(x * x for x in xs) / len(xs)\n",
    "test": PLUS_TEST + "def check(candidate):\n    inputs = [[[1, 3]], [[0.1, 0.2, 0.3]], [[5]]]\n"
    "    results = [(2.0, 5.0), (0.2, 0.14 / 3), (5.0, 25.0)]\n"
    "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n",
    "entry_point": "means",
}
HUMANEVAL = {"humaneval": HELPED, "humaneval_plus": MEANS}
MBPP_FULL = {
    "task_id": 900,
    "text": "Write a function to find the depth of a binary tree.",
    "code": "class Node:\r\n  def __init__(self, data):\r\n    self.data = data\r\n    self.left = self.right = None\r\n"
    "def depth(root):\r\n  return 0 if root is None else 1 + max(depth(root.left), depth(root.right))",
    "test_list": ["assert depth(root) == 3", "assert depth(root.left) == 2", "assert depth(None) == 0"],
    "test_setup_code": "root = Node(1)\r\nroot.left = Node(2)\r\nroot.left.left = Node(3)",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 901,
    "prompt": "Write a function to find the area of a circle.",
    "code": "import math\ndef area(r):\n  return math.pi * r * r",
    "test_imports": ["import math"],
    "test_list": [
        "assert math.isclose(area(10), 314.15926535897932, rel_tol=0.001)",
        "assert math.isclose(area(5), 78.53981633974483, rel_tol=0.001)",
        "assert area(0) == 0",
    ],
}
MBPP_PLUS = {
    "task_id": 902,
    "code": "def shared(a, b):\n  return tuple(set(a) & set(b))",
    "prompt": "Write a function to find the shared elements from the given two lists.",
    "source_file": "x.ipynb",
    "test_imports": [],
    "test_list": ["assert set(shared((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))"] * 3,
    "test": PLUS_TEST + "inputs = [[(3, 4, 5, 6), (5, 7, 4, 10)], [(1, 2), (3,)]]\nresults = [(4, 5), ()]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(set(shared(*inp)), set(exp), 0)\n",
}
MBPP = {"mbpp": MBPP_SANITIZED, "mbpp_full": MBPP_FULL, "mbpp_plus": MBPP_PLUS}


def encoded(cases: list[dict[str, str]]) -> str:
    """Return private tests as the Hub has them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def live(number: int, cases: list[dict[str, str]], starter: str = "", name: str = "", **others: str) -> dict[str, str]:
    """Return a record of LiveCodeBench whose first test is public."""
    return {
        "question_title": f"Question {number}",
        "question_content": f"Text of question {number}.",
        "platform": "leetcode" if starter else "atcoder",
        "question_id": f"q{number}",
        "contest_id": "abc",
        "contest_date": "2024-08-10T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": encoded(cases[1:]),
        "metadata": json.dumps({"func_name": name} if name else {}),
        **others,
    }


SUMS = live(
    1,
    [
        {"input": f"{n}\n{' '.join(str(i) for i in range(n))}\n", "output": f"{n * (n - 1) // 2}\n", "testtype": "stdin"}
        for n in (1, 2, 3, 10)
    ],
)
APPEND = live(
    2,
    [
        {"input": json.dumps(given) + "\n" + json.dumps(one), "output": json.dumps([*given, one]), "testtype": "functional"}
        for given, one in (([1], 2), ([], 3), ([4, 5], 6))
    ],
    starter="class Solution:\n    def append(self, nums: List[int], one: int) -> List[int]:\n        ",
    name="append",
    difficulty="hard",
    contest_date="2025-01-05T00:00:00",
)
LIVE = {"stdin": SUMS, "functional": APPEND}
LIVE_RIGHT = {
    "stdin": "n = int(input())\nprint(sum(map(int, input().split())))\n",
    "functional": "class Solution:\n    def append(self, nums: List[int], one: int):\n        return nums + [one]\n",
}
