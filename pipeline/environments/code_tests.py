"""Read the tests of a programming task in the forms that data sets use.

    {"inputs": [...], "outputs": [...]}               stdin and stdout (TACO, APPS); with "fn_name", arguments and results
    [{"input": ..., "output": ..., "testtype": ...}]  LiveCodeBench; "functional" ones are JSON, one argument per line
    ["assert f(1) == 2", ...]                         Python snippets (MBPP, AceCode), each a test
    {"test": ..., "entry_point": ...}                 HumanEval's columns: a snippet, then check(<entry_point>)
    any other text                                    one Python snippet (KodCode)

Expected outputs and results stay outside of the sandbox. So does the right side of `assert <expression> == <literal>`, the form
of most snippets: alone, joined by `and`, one after another, or as in `assert (<expression> == <literal>) == True`. The sandbox
reports the values of the expressions, and they are compared here. Any other snippet (`assert abs(f(1) - 2) < 1e-6`, HumanEval's
`check`) runs and judges in the answer's own process, which a deceitful answer can subvert.

A snippet may import the answer as `solution`. Functions test_* that need no arguments are called, as pytest does. A
snippet that defines functions and calls none would pass with every answer, so it is an error.

Leaves out: pytest's fixtures, parameters and classes; `unittest`; imports of tests beyond the sandbox's Python.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

LITERAL_CALLS = {"set": set, "frozenset": frozenset, "sorted": sorted, "list": list, "tuple": tuple, "dict": dict}
"""Functions that may wrap a literal."""
JSON_TYPES = {"bytes": bytes, "complex": complex, "list": list, "tuple": tuple, "set": set | frozenset, "dict": dict}
"""Names of types that JSON lacks -> types of a literal. See SNIPPETS in code.py."""
DEFINITIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass),
)
"""Statements that test nothing."""
LITERAL = 1 << 16
"""Longest text in characters that is parsed as a literal, since a policy writes it."""


@dataclass(frozen=True, slots=True)
class IOTest:
    """The input of a program and its expected output."""

    input: str  # stdin, or JSON of the arguments
    output: str  # stdout, or JSON of the result
    function: str = ""  # function to call; empty: the program reads stdin


@dataclass(frozen=True, slots=True)
class EqualityTest:
    """A Python expression and the value that it must equal."""

    expression: str
    value: Any  # of types that a literal can have


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a task: either programs with inputs and outputs, or Python snippets."""

    cases: tuple[IOTest, ...] = ()
    snippets: tuple[str | EqualityTest, ...] = ()

    def __len__(self) -> int:
        return len(self.cases) + len(self.snippets)


def parse_tests(given: Any) -> Tests:
    """Return the tests in a text of JSON or Python, or in decoded JSON.

    Raises ValueError if there are none, or if a snippet only defines functions.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            pass  # a Python snippet
    if isinstance(given, dict) and isinstance(given.get("test"), str) and isinstance(given.get("entry_point"), str):
        if "def check(" not in given["test"]:
            raise ValueError("'test' does not define check(candidate); expected it to, since check(<entry_point>) is called")
        given = f"{given['test']}\n\ncheck({given['entry_point']})\n"
    if isinstance(given, str) and given.strip():
        return Tests(snippets=(_snippet(given),))
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        function = given.get("fn_name") or ""
        if len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"got {len(given['inputs'])} inputs and {len(given['outputs'])} outputs; expected as many of both")
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        found = Tests(tuple(IOTest(_text(put, function), _text(out, function), function) for put, out in pairs))
    elif isinstance(given, list) and all(isinstance(test, str) for test in given):
        found = Tests(snippets=tuple(_snippet(piece) for piece in given))
    elif isinstance(given, list) and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in given):
        found = Tests(tuple(_livecodebench_test(test) for test in given))
    else:
        raise ValueError(
            "got tests in an unknown form; expected inputs and outputs, a list of {input, output}, test and entry_point, or"
            " Python snippets"
        )
    if not len(found):
        raise ValueError("no tests")
    return found


def _snippet(code: str) -> str | EqualityTest:
    """Return the equality that a snippet asserts, else the code to run. No answer passes code that is not Python.

    Raises ValueError if it tests nothing.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]
    if calls := [f"{one.name}()\n" for one in functions if _needs_nothing(one.args)]:
        return f"{code}\n\n{''.join(dict.fromkeys(calls))}"
    if all(map(_only_defines, body)):
        raise ValueError(f"the snippet {code.strip()[:80]!r} defines tests and calls none, so every answer would pass it")
    assertions = [one for one in body if isinstance(one, ast.Assert)]
    return (_all_of([_equality(one.test) for one in assertions]) if len(assertions) == len(body) else None) or code


def _needs_nothing(arguments: ast.arguments) -> bool:
    return len(arguments.posonlyargs + arguments.args) == len(arguments.defaults) and None not in arguments.kw_defaults


def _only_defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant)  # a docstring
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True  # a snippet does not run as a program
        case ast.If(body=body, orelse=other):
            return all(map(_only_defines, [*body, *other]))
        case ast.Try(body=body, orelse=other, finalbody=last, handlers=handlers):
            caught = [one for handler in handlers for one in handler.body]
            return all(map(_only_defines, [*body, *other, *last, *caught]))
    return isinstance(statement, DEFINITIONS)


def _equality(test: ast.expr) -> EqualityTest | None:
    """Return the equality that a test asserts, None if it asserts something else.

    A comparison inside it is never left to the answer's own objects.
    """
    match test:
        case ast.BoolOp(op=ast.And(), values=tests):
            return _all_of([_equality(one) for one in tests])
        case ast.Compare(
            left=ast.Compare() | ast.BoolOp() as inner, ops=[ast.Eq() | ast.Is()], comparators=[ast.Constant(True)]
        ):
            return _equality(inner)
        case ast.Compare(
            left=ast.Constant(True), ops=[ast.Eq() | ast.Is()], comparators=[ast.Compare() | ast.BoolOp() as inner]
        ):
            return _equality(inner)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for expression, literal in ((left, right), (right, left)):
                try:
                    return EqualityTest(ast.unparse(expression), _value(literal))
                except (ValueError, TypeError, RecursionError, MemoryError):
                    continue  # not a literal
    return None


def _all_of(equalities: list[EqualityTest | None]) -> EqualityTest | None:
    """Return one equality of tuples for several equalities, the only one as it is, None if any is None."""
    present = [one for one in equalities if one is not None]
    if len(present) < len(equalities):
        return None
    if len(present) == 1:
        return present[0]
    return EqualityTest(f"({', '.join(one.expression for one in present)})", tuple(one.value for one in present))


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, or of calls like set([1, 2]). Raises ValueError or TypeError for another node."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[given], keywords=[]) if name in LITERAL_CALLS:
            return LITERAL_CALLS[name](ast.literal_eval(given))
        case _:
            return ast.literal_eval(node)


def _text(value: Any, function: str) -> str:
    if function:
        return json.dumps(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _livecodebench_test(test: dict[str, Any]) -> IOTest:
    if test.get("testtype", "stdin") == "stdin":
        return IOTest(test["input"], test["output"])
    if not (function := test.get("fn_name") or test.get("func_name")):
        raise ValueError("a functional test lacks fn_name")
    arguments = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
    return IOTest(json.dumps(arguments), json.dumps(json.loads(test["output"])), function)


def same_output(printed: str, expected: str) -> bool:
    """Return whether outputs agree, apart from spaces at line ends and empty lines at the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_result(printed: str, expected: str) -> bool:
    """Return whether two JSON values agree. APPS wraps a result in a list of one."""
    try:
        result = json.loads(printed)
    except (ValueError, RecursionError):
        return False
    right = json.loads(expected)
    return result == right or (isinstance(right, list) and len(right) == 1 and result == right[0])


def same_literal(shown: str, answer: str) -> bool:
    """Return whether a value equals the answer: the same text, the same literal, or a string with that text.

    shown: the value as `pformat` writes it, with strings quoted and long values on several lines. True does not equal 1: code
    that ends in a comparison has not computed a number.
    """
    if shown.strip() == answer:
        return True
    if len(shown) > LITERAL:
        return False
    try:
        value = ast.literal_eval(shown.strip())
        if isinstance(value, str) and value == answer:
            return True
        expected = ast.literal_eval(answer)
        return value == expected and isinstance(value, bool) == isinstance(expected, bool)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def same_value(encoded: str, expected: Any) -> bool:
    """Return whether a value equals the expected one like Python's ==, for types that a literal can have.

    encoded: JSON of SNIPPETS in code.py, which an answer may have forged. An object with an `__eq__` of its own never equals.
    """
    try:
        return _same(json.loads(encoded), expected)
    except (ValueError, RecursionError):
        return False


def _same(value: Any, expected: Any) -> bool:
    """Compare only as deep as `expected` and without hashing, since a forged value may be made to take long."""
    if expected is None or isinstance(expected, str | int | float):  # a bool is an int
        if isinstance(value, dict) and isinstance(value.get("int"), str) and isinstance(expected, int | float):
            value = int(value["int"], 16)
        return not isinstance(value, list | dict) and value == expected
    kind = next((name for name, types in JSON_TYPES.items() if isinstance(expected, types)), None)
    items = value.get(kind) if isinstance(value, dict) else None
    if kind == "complex":
        return items == [expected.real, expected.imag]
    if not isinstance(items, list) or len(items) != len(expected):
        return False
    if kind in ("bytes", "list", "tuple"):
        return all(map(_same, items, expected))
    if kind == "dict":
        items, expected = [{"list": pair} for pair in items], [list(pair) for pair in expected.items()]
    return all(any(_same(item, one) for item in items) for one in expected)
