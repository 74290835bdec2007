"""The tests of a programming task, in the forms in which data sets have them.

    {"inputs": [...], "outputs": [...]}               stdin and stdout (TACO, APPS); with "fn_name", arguments and results
    [{"input": ..., "output": ..., "testtype": ...}]  LiveCodeBench's; "functional" ones are JSON, an argument a line
    ["assert f(1) == 2", ...]                         pieces of Python (MBPP, AceCode), each a test of its own
    {"test": ..., "entry_point": ...}                 HumanEval's columns: a piece of Python, then check(<entry_point>)
    any other text                                    one piece of Python (KodCode)

What an answer is to print or return stays outside the sandbox. So does the right side of `assert <expression> == <literal>`,
which most pieces are, alone, joined by `and`, one after another, or as in `assert (<expression> == <literal>) == True`: what
the expressions come to is told, and compared here. Any other piece (`assert abs(f(1) - 2) < 1e-6`, `check` of HumanEval) judges
in the answer's own process, where an answer that sets out to deceive it can.

A piece may import the answer as `solution`. Its functions test_* that need no arguments are called, as pytest does. One that
defines and calls nothing would be passed by every answer, and is an error.

Leaves out: pytest's fixtures, parameters and classes; `unittest`; what tests import beyond the sandbox's Python.
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
DEFINITIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass),
)
"""Statements that test nothing."""
LITERAL = 1 << 16
"""Characters that are read as a literal at most: a policy writes it."""


@dataclass(frozen=True, slots=True)
class IOTest:
    """The input of a program, and the output that it must have."""

    input: str  # of stdin; or JSON of the arguments
    output: str  # of stdout; or JSON of the result
    function: str = ""  # empty: the program reads stdin


@dataclass(frozen=True, slots=True)
class EqualityTest:
    """An expression of Python, and what it is to be equal to."""

    expression: str
    value: Any  # of a literal


@dataclass(frozen=True, slots=True)
class Tests:
    """Either cases or pieces."""

    cases: tuple[IOTest, ...] = ()
    pieces: tuple[str | EqualityTest, ...] = ()

    def __len__(self) -> int:
        return len(self.cases) + len(self.pieces)


def parse_tests(given: Any) -> Tests:
    """`given`: a text, with JSON in it or Python, or what is in the JSON. Raises ValueError if there is no test in it, or a
    piece that only defines some.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            pass  # it is Python
    if isinstance(given, dict) and isinstance(given.get("test"), str) and isinstance(given.get("entry_point"), str):
        if "def check(" not in given["test"]:
            raise ValueError("'test' does not define check(candidate), which is to be called with 'entry_point'")
        given = f"{given['test']}\n\ncheck({given['entry_point']})\n"
    if isinstance(given, str) and given.strip():
        return Tests(pieces=(_piece(given),))
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        function = given.get("fn_name") or ""
        if len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"{len(given['inputs'])} inputs and {len(given['outputs'])} outputs")
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        found = Tests(tuple(IOTest(_text(put, function), _text(out, function), function) for put, out in pairs))
    elif isinstance(given, list) and all(isinstance(test, str) for test in given):
        found = Tests(pieces=tuple(_piece(piece) for piece in given))
    elif isinstance(given, list) and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in given):
        found = Tests(tuple(_live(test) for test in given))
    else:
        raise ValueError(
            "no tests in a form that is known: inputs and outputs, a list of {input, output}, test and"
            " entry_point, or pieces of Python"
        )
    if not len(found):
        raise ValueError("no tests")
    return found


def _piece(code: str) -> str | EqualityTest:
    """Return an equation if it is an assertion of one. What is no Python is a piece that nobody passes. Raises ValueError if it
    tests nothing.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]
    if calls := [f"{one.name}()\n" for one in functions if _needs_nothing(one.args)]:
        return f"{code}\n\n{''.join(dict.fromkeys(calls))}"
    if all(map(_only_defines, body)):
        raise ValueError(f"a piece of Python, {code.strip()[:80]!r}, defines tests and calls none, so that all would pass it")
    if not all(isinstance(one, ast.Assert) for one in body):
        return code
    return _all_of([_equation(one.test) for one in body]) or code


def _needs_nothing(arguments: ast.arguments) -> bool:
    return len(arguments.posonlyargs + arguments.args) == len(arguments.defaults) and None not in arguments.kw_defaults


def _only_defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant)  # a docstring
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True  # it is no program here
        case ast.If(body=body, orelse=other):
            return all(map(_only_defines, [*body, *other]))
        case ast.Try(body=body, orelse=other, finalbody=last, handlers=handlers):
            caught = [one for handler in handlers for one in handler.body]
            return all(map(_only_defines, [*body, *other, *last, *caught]))
    return isinstance(statement, DEFINITIONS)


def _equation(test: ast.expr) -> EqualityTest | None:
    """None if it is none. A comparison within it is not left to the answer's own objects."""
    match test:
        case ast.BoolOp(op=ast.And(), values=tests):
            return _all_of([_equation(one) for one in tests])
        case ast.Compare(
            left=ast.Compare() | ast.BoolOp() as inner, ops=[ast.Eq() | ast.Is()], comparators=[ast.Constant(True)]
        ):
            return _equation(inner)
        case ast.Compare(
            left=ast.Constant(True), ops=[ast.Eq() | ast.Is()], comparators=[ast.Compare() | ast.BoolOp() as inner]
        ):
            return _equation(inner)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for expression, literal in ((left, right), (right, left)):
                try:
                    return EqualityTest(ast.unparse(expression), _value(literal))
                except (ValueError, TypeError, RecursionError, MemoryError):
                    continue  # it is no literal
    return None


def _all_of(equations: list[EqualityTest | None]) -> EqualityTest | None:
    """Return one equation of tuples in place of several, the only one as it is, or None if one is None."""
    if len(equations) == 1:
        return equations[0]
    if None in equations:
        return None
    return EqualityTest(f"({', '.join(one.expression for one in equations)})", tuple(one.value for one in equations))


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, or of set([1, 2]) and the like. Raises ValueError or TypeError for another node."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[given], keywords=[]) if name in BUILT:
            return BUILT[name](ast.literal_eval(given))
        case _:
            return ast.literal_eval(node)


def _text(value: Any, function: str) -> str:
    if function:
        return json.dumps(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _live(test: dict[str, Any]) -> IOTest:
    if test.get("testtype", "stdin") == "stdin":
        return IOTest(test["input"], test["output"])
    if not (function := test.get("fn_name") or test.get("func_name")):
        raise ValueError("a functional test without fn_name")
    arguments = [json.loads(line) for line in test["input"].splitlines() if line.strip()]
    return IOTest(json.dumps(arguments), json.dumps(json.loads(test["output"])), function)


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


def same_literal(shown: str, answer: str) -> bool:
    """Return whether a value is the answer: the same text, the same literal, or a string with that text. `shown`: as `pformat`
    has it, which quotes texts, and breaks what is long into lines. True is not 1 here: code that ends in a comparison has no
    number.
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


def same_value(told: str, expected: Any) -> bool:
    """`told`: JSON as `pieces.py` writes it, of a value or of whatever an answer likes. Equal as Python's == has it, for what a
    literal can be; an object that says itself that it is equal is not.
    """
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
