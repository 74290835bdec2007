"""The tests of a programming task, in the forms in which data sets have them.

    {"inputs": [...], "outputs": [...]}               stdin and stdout (TACO, APPS); with "fn_name", arguments and results
    [{"input": ..., "output": ..., "testtype": ...}]  LiveCodeBench's; "functional" ones are JSON, an argument a line
    ["assert f(1) == 2", ...]                         pieces of Python (MBPP, AceCode), each a test of its own
    any other text                                    one piece of Python (KodCode, HumanEval)

What an answer is to print or return stays outside the sandbox. So does the right side of `assert <expression> == <literal>`,
which most pieces are: what the expression comes to is told, and compared here. Any other piece (`assert abs(f(1) - 2) < 1e-6`,
`check` of HumanEval) judges in the answer's own process, where an answer that sets out to deceive it can.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

BUILT = {"set": set, "frozenset": frozenset, "sorted": sorted, "list": list, "tuple": tuple, "dict": dict}
"""Calls that a literal may be in."""
KINDS = {"bytes": bytes, "complex": complex, "list": list, "tuple": tuple, "set": set | frozenset, "dict": dict}
"""What JSON has no word for -> the types of a literal."""


@dataclass(frozen=True, slots=True)
class Case:
    """What goes in, and what is to come out."""

    input: str  # of stdin; or JSON of the arguments
    output: str  # of stdout; or JSON of the result
    function: str = ""  # empty: the program reads stdin


@dataclass(frozen=True, slots=True)
class Equation:
    """An expression of Python, and what it is to be equal to."""

    expression: str
    value: Any  # of a literal


@dataclass(frozen=True, slots=True)
class Tests:
    """Either cases or pieces."""

    cases: tuple[Case, ...] = ()
    pieces: tuple[str | Equation, ...] = ()

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
        return Tests(pieces=(_piece(given),))
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        function = given.get("fn_name") or ""
        if len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"{len(given['inputs'])} inputs and {len(given['outputs'])} outputs")
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        found = Tests(tuple(Case(_text(put, function), _text(out, function), function) for put, out in pairs))
    elif isinstance(given, list) and all(isinstance(test, str) for test in given):
        found = Tests(pieces=tuple(_piece(piece) for piece in given))
    elif isinstance(given, list) and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in given):
        found = Tests(tuple(_live(test) for test in given))
    else:
        raise ValueError("no tests in a form that is known: inputs and outputs, a list of {input, output}, or pieces of Python")
    if not len(found):
        raise ValueError("no tests")
    return found


def _piece(code: str) -> str | Equation:
    """An equation if it is an assertion of one. Raises nothing: what is no Python is a piece that nobody passes."""
    try:
        (statement,) = ast.parse(code).body
        test = statement.test if isinstance(statement, ast.Assert) else None
        if not isinstance(test, ast.Compare) or [type(operator) for operator in test.ops] != [ast.Eq]:
            return code
        for expression, literal in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return Equation(ast.unparse(expression), _value(literal))
            except (ValueError, TypeError):
                continue  # it is no literal
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return code


def _value(node: ast.expr) -> Any:
    """Of a literal, or set([1, 2]) and the like. Raises ValueError or TypeError for another node."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[given], keywords=[]) if name in BUILT:
            return BUILT[name](ast.literal_eval(given))
        case _:
            return ast.literal_eval(node)


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


def same_value(told: str, expected: Any) -> bool:
    """`told`: JSON as `pieces.py` writes it, of a value or of whatever an answer likes. Equal as Python's == has it, for what a
    literal can be; an object that says itself that it is equal is not."""
    try:
        return _same(json.loads(told), expected)
    except (ValueError, RecursionError):
        return False


def _same(told: Any, expected: Any) -> bool:
    """Goes as deep as `expected` does, and hashes nothing: what is told may have been made to take long."""
    if expected is None or isinstance(expected, str | int | float):  # a bool is an int
        if isinstance(told, dict) and isinstance(told.get("int"), str) and isinstance(expected, int | float):
            told = int(told["int"], 16)
        return not isinstance(told, list | dict) and told == expected
    kind = next((name for name, types in KINDS.items() if isinstance(expected, types)), None)
    items = told.get(kind) if isinstance(told, dict) else None
    if kind == "complex":
        return items == [expected.real, expected.imag]
    if not isinstance(items, list) or len(items) != len(expected):
        return False
    if kind in ("bytes", "list", "tuple"):
        return all(map(_same, items, expected))
    if kind == "dict":
        items, expected = [{"list": pair} for pair in items], [list(pair) for pair in expected.items()]
    return all(any(_same(item, one) for item in items) for one in expected)
