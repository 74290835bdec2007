"""The tests of a programming task, in the forms in which data sets have them.

    {"inputs": [...], "outputs": [...]}               stdin and stdout (TACO, APPS); with "fn_name", arguments and results
    [{"input": ..., "output": ..., "testtype": ...}]  LiveCodeBench's; "functional" ones are JSON, an argument a line
    ["assert f(1) == 2", ...]                         pieces of Python (MBPP, AceCode), each a test of its own
    any other text                                    one piece of Python (KodCode, HumanEval)

What an answer is to print or return stays outside the sandbox. Pieces of Python run beside the answer, in one process: an
answer that sets out to deceive them can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """What goes in, and what is to come out."""

    input: str  # of stdin; or JSON of the arguments
    output: str  # of stdout; or JSON of the result
    function: str = ""  # empty: the program reads stdin


@dataclass(frozen=True, slots=True)
class Tests:
    """Either cases or pieces."""

    cases: tuple[Case, ...] = ()
    pieces: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.cases) + len(self.pieces)


def read(given: Any) -> Tests:
    """`given`: a text, with JSON in it or Python, or what is in the JSON. Raises ValueError if there is no test in it."""
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            pass  # it is Python
    if isinstance(given, str) and given.strip():
        return Tests(pieces=(given,))
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        function = given.get("fn_name") or ""
        if len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"{len(given['inputs'])} inputs and {len(given['outputs'])} outputs")
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        found = Tests(tuple(Case(_text(put, function), _text(out, function), function) for put, out in pairs))
    elif isinstance(given, list) and all(isinstance(test, str) for test in given):
        found = Tests(pieces=tuple(given))
    elif isinstance(given, list) and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in given):
        found = Tests(tuple(_live(test) for test in given))
    else:
        raise ValueError("no tests in a form that is known: inputs and outputs, a list of {input, output}, or pieces of Python")
    if not len(found):
        raise ValueError("no tests")
    return found


def _text(value: Any, function: str) -> str:
    if function:
        return json.dumps(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _live(test: dict[str, Any]) -> Case:
    if test.get("testtype", "stdin") == "stdin":
        return Case(test["input"], test["output"])
    if not (function := test.get("fn_name") or test.get("func_name")):
        raise ValueError("a functional test without fn_name")
    arguments = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
    return Case(json.dumps(arguments), json.dumps(json.loads(test["output"])), function)


def same_output(printed: str, expected: str) -> bool:
    """Space at lines' ends and empty lines at the end do not count."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_result(printed: str, expected: str) -> bool:
    """Both JSON. APPS wraps a result in a list of one."""
    try:
        result = json.loads(printed)
    except (ValueError, RecursionError):
        return False
    wanted = json.loads(expected)
    return result == wanted or (isinstance(wanted, list) and len(wanted) == 1 and result == wanted[0])
