"""Read the tests of a programming task in the forms that data sets use.

    {"inputs": [...], "outputs": [...]}               stdin and stdout (TACO, APPS); with "fn_name", arguments and results
    [{"input": ..., "output": ..., "testtype": ...}]  LiveCodeBench; "functional" ones are JSON, one argument per line
    [{"input": ..., "output": ..., "type": ...}]      PrimeIntellect; a "function_call" has a list of arguments, and a result
    ["assert f(1) == 2", ...]                         Python snippets (MBPP, AceCode), each of which is a test
    {"test": ..., "entry_point": ...}                 HumanEval's columns: a snippet, then check(<entry_point>)
    any other text                                    one Python snippet (KodCode)

Expected outputs and results stay outside of the sandbox. So does the right side of `assert <expression> == <literal>`, the form
of most snippets: alone, joined by `and`, several in a row, or as in `assert (<expression> == <literal>) == True`. The sandbox
reports the values of the expressions, and they are compared here. Any other snippet (`assert abs(f(1) - 2) < 1e-6`, HumanEval's
`check`) runs and judges in the answer's own process, which a deceitful answer can subvert.

A snippet may import the answer as `solution`. Functions test_* that need no arguments are called, as pytest does. A
snippet that defines functions without a call would pass with every answer, so it is an error.

Leaves out: pytest's fixtures, parameters and classes; `unittest`; imports of tests beyond the sandbox's Python.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

LITERAL_CALLS = {"set": set, "frozenset": frozenset, "sorted": sorted, "list": list, "tuple": tuple, "dict": dict}
"""Functions that may wrap a literal."""
JSON_TYPES = {"bytes": bytes, "complex": complex, "list": list, "tuple": tuple, "set": set | frozenset, "dict": dict}
"""Names of types that JSON lacks -> types of a literal. See SNIPPETS in code.py."""
DEFINITIONS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Pass),
)
"""Statements that do not test the answer."""
LITERAL = 1 << 16
"""Maximum number of characters of a text that is parsed as a literal: the policy writes it, and may write a huge one."""


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


def parse_tests(source: Any) -> Tests:
    """Return the tests in a text of JSON or Python, or in decoded JSON.

    Raises ValueError if there are none, or if a snippet only defines functions.
    """
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        try:
            source = json.loads(source)
        except json.JSONDecodeError:
            pass  # a Python snippet
    if isinstance(source, dict) and isinstance(source.get("test"), str) and isinstance(source.get("entry_point"), str):
        if "def check(" not in source["test"]:
            raise ValueError("'test' does not define check(candidate); expected this function, which the judge calls")
        source = f"{source['test']}\n\ncheck({source['entry_point']})\n"
    if isinstance(source, str) and source.strip():
        return Tests(snippets=(_snippet(source),))
    if isinstance(source, dict) and isinstance(source.get("inputs"), list) and isinstance(source.get("outputs"), list):
        function = source.get("fn_name") or ""
        inputs, outputs = source["inputs"], source["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"got {len(inputs)} inputs and {len(outputs)} outputs; expected equal numbers")
        pairs = zip(inputs, outputs, strict=True)
        tests = Tests(tuple(IOTest(_text(stdin, function), _text(stdout, function), function) for stdin, stdout in pairs))
    elif isinstance(source, list) and all(isinstance(test, str) for test in source):
        tests = Tests(snippets=tuple(_snippet(piece) for piece in source))
    elif isinstance(source, list) and all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in source):
        tests = Tests(tuple(map(_io_test, source)))
    else:
        raise ValueError(
            "got tests in an unknown form; expected {inputs, outputs}, a list of {input, output}, {test, entry_point}, or"
            " Python snippets"
        )
    if not len(tests):
        raise ValueError("no tests")
    return tests


def _snippet(code: str) -> str | EqualityTest:
    """Return the equality that a snippet asserts, or else the snippet's code, to be run. Code with syntax errors never passes.

    Raises ValueError if the snippet tests nothing.
    """
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    if calls := [f"{function.name}()\n" for function in functions if _needs_no_arguments(function.args)]:
        return f"{code}\n\n{''.join(dict.fromkeys(calls))}"
    if all(map(_only_defines, body)):
        raise ValueError(f"the snippet {code.strip()[:80]!r} defines tests and calls none, so every answer would pass it")
    assertions = [node for node in body if isinstance(node, ast.Assert)]
    return (_all_of([_equality(node.test) for node in assertions]) if len(assertions) == len(body) else None) or code


def _needs_no_arguments(arguments: ast.arguments) -> bool:
    return len(arguments.posonlyargs + arguments.args) == len(arguments.defaults) and None not in arguments.kw_defaults


def _only_defines(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=value):
            return isinstance(value, ast.Constant)  # a docstring
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True  # a snippet does not run as a program
        case ast.If(body=body, orelse=orelse):
            return all(map(_only_defines, [*body, *orelse]))
        case ast.Try(body=body, orelse=orelse, finalbody=finalbody, handlers=handlers):
            handler_statements = [inner for handler in handlers for inner in handler.body]
            return all(map(_only_defines, [*body, *orelse, *finalbody, *handler_statements]))
    return isinstance(statement, DEFINITIONS)


def _equality(test: ast.expr) -> EqualityTest | None:
    """Return the equality that a test asserts, or None if it asserts something else.

    The answer's own objects never decide the comparison.
    """
    match test:
        case ast.BoolOp(op=ast.And(), values=tests):
            return _all_of([_equality(operand) for operand in tests])
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
    """Join equalities into one equality of tuples. Return a single equality as it is, and None if any of them is None."""
    present = [equality for equality in equalities if equality is not None]
    if len(present) < len(equalities):
        return None
    if len(present) == 1:
        return present[0]
    expressions = ", ".join(equality.expression for equality in present)
    return EqualityTest(f"({expressions})", tuple(equality.value for equality in present))


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, or of calls like set([1, 2]). Raises ValueError or TypeError for another node."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[literal], keywords=[]) if name in LITERAL_CALLS:
            return LITERAL_CALLS[name](ast.literal_eval(literal))
        case _:
            return ast.literal_eval(node)


def _text(value: Any, function: str) -> str:
    if function:
        return json.dumps(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _io_test(test: dict[str, Any]) -> IOTest:
    """Return a test of LiveCodeBench or PrimeIntellect."""
    kind, given, expected = test.get("testtype") or test.get("type") or "stdin", test["input"], test["output"]
    if kind in ("stdin", "stdin_stdout"):
        return IOTest(_text(given, ""), _text(expected, ""))
    named = test.get("metadata")
    function = test.get("fn_name") or test.get("func_name") or (named.get("func_name") if isinstance(named, dict) else None)
    if not function:
        raise ValueError(f"a {kind} test has neither fn_name nor func_name")
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    expected = json.loads(expected) if kind == "functional" and isinstance(expected, str) else expected
    return IOTest(json.dumps(given), json.dumps(expected), function)


def same_stdout(printed: str, expected: str) -> bool:
    """Return whether outputs agree line by line, as texts or decimal numbers. Spaces around lines and outputs do not count."""
    lines, expected_lines = _lines(printed), _lines(expected)
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:  # not numbers
        return False


def same_result(printed: str, expected: str) -> bool:
    """Return whether two JSON texts have the same value. An expected list of one item, as in APPS, equals its item too."""
    try:
        result = json.loads(printed)
    except (ValueError, RecursionError):
        return False
    expected_result = json.loads(expected)
    is_wrapped = isinstance(expected_result, list) and len(expected_result) == 1
    return result == expected_result or (is_wrapped and result == expected_result[0])


def same_literal(printed_value: str, answer: str) -> bool:
    """Return whether a value equals the answer: it has the same text, is the same literal, or is a string of that text.

    printed_value: the value as `pformat` writes it, with strings quoted and long values on several lines. True does not equal
    1: code that ends in a comparison has not computed a number.
    """
    if printed_value.strip() == answer:
        return True
    if len(printed_value) > LITERAL:
        return False
    try:
        value = ast.literal_eval(printed_value.strip())
        if isinstance(value, str) and value == answer:
            return True
        expected = ast.literal_eval(answer)
        return value == expected and isinstance(value, bool) == isinstance(expected, bool)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def same_value(encoded: str, expected: Any) -> bool:
    """Return whether a value equals the expected value as by Python's ==, for the types that a literal can have.

    encoded: the value as JSON from SNIPPETS in code.py, which an answer may have forged. An object with its own `__eq__` is
    never equal.
    """
    try:
        return _same(json.loads(encoded), expected)
    except (ValueError, RecursionError):
        return False


def _same(value: Any, expected: Any) -> bool:
    """Return whether values are equal, at most as deep as `expected` and without hashing: a forged value could take long."""
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
    return all(any(_same(item, expected_item) for item in items) for expected_item in expected)
