"""Evaluate tests, patterns and arithmetic of a shell script, whose values may be unknown."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.config import RecipeError

MARK = re.compile("\ue000(\\d+)\ue001")
"""An unknown part of a value: the index of its cause."""
Status = bool | int
"""True or False; a number: unknown, by the index of its cause plus 2."""


class ScriptState(Protocol):
    """Provides what a test needs of the script that runs it."""

    def lookup(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not set."""
        ...

    def arithmetic(self, text: str) -> str:
        """Return the value of an expression of whole numbers."""
        ...

    def unknown_status(self, reason: str) -> Status:
        """Return an unknown status."""
        ...

    def fail(self, message: str) -> RecipeError:
        """Return an error with the line of the command."""
        ...


def status_of(value: str) -> Status:
    """Return the status of a number: whether it is not 0."""
    if match := MARK.search(value):
        return int(match[1]) + 2
    return value != "0"


FILE_TESTS = ("-e", "-f", "-d", "-r", "-w", "-x", "-s", "-L", "-h", "-p", "-S", "-t")
NUMBER_TESTS = {"-eq": "eq", "-ne": "ne", "-lt": "lt", "-le": "le", "-gt": "gt", "-ge": "ge"}
LONGEST_MATCHED = 10_000  # characters
BINARY = {"=", "==", "!=", "=~", "<", ">", *NUMBER_TESTS}


@dataclass
class Condition:
    """A test of `[ ... ]`, or of `[[ ... ]]` with globs=True. operators: the indices of tokens that are operators."""

    run: ScriptState
    tokens: list[str]
    globs: bool
    operators: set[int] | None
    at: int = 0

    def evaluate(self) -> Status:
        """Return whether the test holds."""
        if not self.tokens:
            return False
        status = self._alternatives()
        if self.at < len(self.tokens):
            raise self.run.fail(f"got '{self.tokens[self.at]}' in a test; expected its end")
        return status

    def _is_operator(self, *texts: str) -> bool:
        fits = self.at < len(self.tokens) and self.tokens[self.at] in texts
        return fits and (self.operators is None or self.at in self.operators or self.tokens[self.at] == "!")

    def _alternatives(self) -> Status:
        status = self._conjunction()
        while self._is_operator("||", "-o"):
            self.at += 1
            other = self._conjunction()
            status = True if status is True or other is True else (other if status is False else status)
        return status

    def _conjunction(self) -> Status:
        status = self._negation()
        while self._is_operator("&&", "-a"):
            self.at += 1
            other = self._negation()
            status = False if status is False or other is False else (other if status is True else status)
        return status

    def _negation(self) -> Status:
        if self._is_operator("!") and self.at + 1 < len(self.tokens):
            self.at += 1
            status = self._negation()
            return not status if isinstance(status, bool) else status
        if self._is_operator("("):
            self.at += 1
            status = self._alternatives()
            self.at += 1
            return status
        return self._primary()

    def _primary(self) -> Status:
        left = self.tokens[self.at]
        following = self.tokens[self.at + 1 : self.at + 3]
        if len(following) == 2 and following[0] in BINARY:
            self.at += 3
            return self._compare(left, *following)
        if left in ("-z", "-n", "-v", *FILE_TESTS) and following:
            self.at += 2
            return self._unary(left, following[0])
        self.at += 1
        return status_of(left) if MARK.search(left) else left != ""

    def _unary(self, sign: str, text: str) -> Status:
        if sign == "-v":
            return self.run.lookup(text) is not None
        if sign in ("-z", "-n"):
            rest = MARK.sub("", text)
            if rest == "" and MARK.search(text):
                return status_of(text)
            return (text == "") is (sign == "-z")
        return self.run.unknown_status(f"`{sign} {MARK.sub('?', text)[:60]}`, a test of a file")

    def _compare(self, left: str, sign: str, right: str) -> Status:
        for text in (left, right):
            if MARK.search(text):
                return status_of(text)
        if sign in NUMBER_TESTS:
            numbers = [self.run.arithmetic(text or "0") for text in (left, right)]
            unknown = next((number for number in numbers if MARK.search(number)), None)
            if unknown is not None:
                return status_of(unknown)
            return getattr(operator, NUMBER_TESTS[sign])(*map(int, numbers))
        if sign in "<>":
            return left < right if sign == "<" else left > right
        if sign == "=~":
            if re.search(r"\)\s*[*+{]", right) or len(left) > LONGEST_MATCHED:  # which could take for ever
                return self.run.unknown_status(f"the regular expression {right[:40]}")
            try:
                return re.search(right, left) is not None
            except re.error:
                return self.run.unknown_status(f"the regular expression {right[:40]}")
        equal = re.fullmatch(glob_pattern(right), left, re.DOTALL) is not None if self.globs else left == right
        return equal is (sign != "!=")


OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
"""Operators that are the same in bash and in Python."""


def compute(text: str, names: Mapping[str, str], depth: int = 0) -> int:
    """Return the value of bash's arithmetic expression. names: the values of its variables, which may be expressions."""
    if depth > 10 or len(text) > 1000:
        raise ValueError(text)
    choice = re.fullmatch(r"([^?]*)\?([^:]*):(.*)", text, re.DOTALL)
    if choice:
        condition, one, other = choice.groups()
        return compute(one if compute(condition, names, depth + 1) else other, names, depth + 1)
    source = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    source = re.sub(r"\b0([0-7]+)\b", r"0o\1", source)

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return compute(names.get(node.id, "0"), names, depth + 1)
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            return {ast.USub: -inner, ast.UAdd: inner, ast.Not: int(not inner), ast.Invert: ~inner}[type(node.op)]
        if isinstance(node, ast.BoolOp):
            results = [value(one) for one in node.values]
            return int(all(results) if isinstance(node.op, ast.And) else any(results))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return int(OPERATIONS[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if isinstance(node, ast.BinOp):
            return _binary(node.op, value(node.left), value(node.right))
        raise ValueError(text)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's parser, for text that is no expression
        tree = ast.parse(f"({source})", mode="eval")
    return value(tree.body)


def _binary(sign: ast.operator, left: int, right: int) -> int:
    if isinstance(sign, ast.Div | ast.Mod):  # bash rounds towards zero
        quotient = abs(left) // abs(right) * (1 if (left < 0) is (right < 0) else -1)
        return quotient if isinstance(sign, ast.Div) else left - quotient * right
    if isinstance(sign, ast.Pow | ast.LShift | ast.RShift):
        if not 0 <= right < 64 or abs(left) > 1 << 63:
            raise ValueError(right)
        return left**right if isinstance(sign, ast.Pow) else left << right if isinstance(sign, ast.LShift) else left >> right
    return OPERATIONS[type(sign)](left, right)


def glob_pattern(text: str) -> str:
    """Return a regular expression for a pattern of file names, without anchors."""
    return fnmatch.translate(text).removeprefix("(?s:").removesuffix(")\\Z")
