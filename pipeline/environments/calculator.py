"""A calculator as a tool: the value of an arithmetic expression that a model wrote, exact, in microseconds.

The syntax tree of the text is walked; nothing is evaluated by Python. Numbers are fractions, so that 0.1+0.2 is 0.3. There are
bounds on the text, on the size of every number on the way and on exponents, so that no expression takes long.

Leaves out: names, complex numbers, all functions but sqrt and abs.
"""

from __future__ import annotations

import ast
import decimal
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

from pipeline.environments.base import Configurable
from pipeline.environments.tool import Tool, ToolError, ToolSession

MAX_CHARACTERS = 256
MAX_BITS = 4096  # of numerator and of denominator: about 1200 digits
SIGNIFICANT = 12  # digits of a value that is no integer

READ_AS = {"^": "**", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"}  # typeset signs
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: _power(a, b),
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[[Fraction], Fraction]] = {"sqrt": lambda a: _power(a, Fraction(1, 2)), "abs": abs}


class Calculator(Configurable, Tool, ToolSession):
    """`{"expression": "47*85"}` -> `3995`. Always ends within milliseconds."""

    parameters: ClassVar = {"expression": str}

    def __init__(self, arguments: Any = None) -> None:
        """Make a calculator; it has no arguments."""

    def open(self) -> ToolSession:
        return self

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        try:
            return evaluate(arguments["expression"])
        except ValueError as error:
            raise ToolError(str(error)) from None


def evaluate(expression: str) -> str:
    """Return the value, as a text: an integer with all its digits, any other number rounded to SIGNIFICANT digits.

    `^` is a power. Raises ValueError, saying what is wrong, for what is no expression, is not defined, or is too large.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    for written, meant in READ_AS.items():
        text = text.replace(written, meant)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: a null character
        raise ValueError(f"'{expression.strip()}' is not an arithmetic expression") from None
    try:
        return _shown(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return _bounded(Fraction(number))
        case ast.Constant(float()):
            return _bounded(_number(ast.get_source_segment(text, node)))
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            return _bounded(BINARY[type(op)](_value(left, text), _value(right, text)))
        case ast.UnaryOp(op, operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand, text))
        case ast.Call(ast.Name(name), [argument], []) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(argument, text))
    raise ValueError(f"'{ast.get_source_segment(text, node)}' is not arithmetic")


def _number(written: str) -> Fraction:
    """Return the number of a text, not of the float that Python makes of it."""
    try:
        number = decimal.Decimal(written)  # of some hundred digits at most, as the text is
    except decimal.InvalidOperation:  # an exponent that even this has not
        number = None
    if number is None or abs(number.adjusted()) > MAX_BITS:  # 1e999999 is short to write
        raise ValueError(f"{written} is out of range")
    return Fraction(number)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        try:
            return Fraction(float(base) ** float(exponent))
        except OverflowError:
            raise ValueError("a number on the way is too large") from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1  # 2 ** bits is a bound from below
    if abs(exponent) * bits > MAX_BITS:
        raise ValueError("a number on the way is too large")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("a number on the way is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = decimal.Context(prec=SIGNIFICANT)
    return str(context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator)).normalize(context))
