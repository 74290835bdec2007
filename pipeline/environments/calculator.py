"""A calculator tool: computes the value of an arithmetic expression that a model wrote, within milliseconds.

It walks the syntax tree of the text and never calls `eval`. Numbers are exact fractions, so 0.1+0.2 is 0.3; only roots and
fractional powers are floats. A result that is not an integer is rounded to 12 digits. Limits on the text's length, on the size
of every intermediate number and on exponents keep every expression fast.

Leaves out: variables, complex numbers, and all functions except sqrt and abs.
"""

from __future__ import annotations

import ast
import decimal
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

from typing_extensions import override

from pipeline.environments.environment import Configurable
from pipeline.environments.tool import Tool, ToolError, ToolSession

MAX_CHARACTERS = 256
MAX_BITS = 4096  # of numerator and of denominator: about 1200 digits
SIGNIFICANT = 12  # digits of a value that is not an integer

SIGNS = {"^": "**", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-"}  # typeset signs
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
    """Maps `{"expression": "47*85"}` to `3995` within milliseconds."""

    parameters: ClassVar = {"expression": str}
    description = "Compute the value of an arithmetic expression."
    descriptions: ClassVar = {"expression": "Numbers, + - * / // % ** ^, parentheses, sqrt and abs, such as 47*85."}

    def __init__(self, arguments: Any = None) -> None:
        """Ignore `arguments`: a calculator has none."""

    @override
    def open(self) -> ToolSession:
        return self

    @override
    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        try:
            return evaluate(arguments["expression"])
        except ValueError as error:
            raise ToolError(str(error)) from None


def evaluate(expression: str) -> str:
    """Return the value as a text: an integer with all its digits, any other number rounded to SIGNIFICANT digits.

    `^` is a power. Raises ValueError if the text is not an expression, or its value is undefined or too large.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    for sign, operator_text in SIGNS.items():
        text = text.replace(sign, operator_text)
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # ValueError: a null character
        raise ValueError(f"'{expression.strip()}' is not an arithmetic expression") from None
    try:
        return _format(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool):
            return _check_size(Fraction(number))
        case ast.Constant(float()):
            return _check_size(_number(ast.get_source_segment(text, node) or ""))
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            return _check_size(BINARY[type(op)](_value(left, text), _value(right, text)))
        case ast.UnaryOp(op, operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand, text))
        case ast.Call(ast.Name(name), [argument], []) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(argument, text))
    raise ValueError(f"'{ast.get_source_segment(text, node)}' is not arithmetic")


def _number(literal: str) -> Fraction:
    """Return the exact value of a decimal literal, without rounding to a float."""
    try:
        number = decimal.Decimal(literal)  # MAX_CHARACTERS bounds its digits
    except decimal.InvalidOperation:  # an exponent beyond the range of Decimal
        number = None
    if number is None or abs(number.adjusted()) > MAX_BITS:  # 1e999999 is a short text
        raise ValueError(f"{literal} is out of range")
    return Fraction(number)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        try:
            return Fraction(float(base) ** float(exponent))
        except OverflowError:
            raise ValueError("an intermediate result is too large") from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1  # 2 ** bits is a lower bound
    if abs(exponent) * bits > MAX_BITS:
        raise ValueError("an intermediate result is too large")
    return base ** int(exponent)


def _check_size(value: Fraction) -> Fraction:
    """Return the value. Raises ValueError if it has more than MAX_BITS bits."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("an intermediate result is too large")
    return value


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = decimal.Context(prec=SIGNIFICANT)
    return str(context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator)).normalize(context))
