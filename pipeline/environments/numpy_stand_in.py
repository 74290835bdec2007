"""A replacement for the functions of numpy that tests of HumanEval+ and MBPP+ use to compare floats. A sandbox may lack numpy.

`code_benchmark.py` copies this file into the tests' sandbox as numpy.py if a program needs nothing else of numpy. It is also
faster to import. Unlike numpy, it compares only lists of the same length, and never one number with all items of a list.
"""

from __future__ import annotations

import math
import re
from typing import Any

NAMES = {"allclose", "isclose", "testing", "ndarray", "float64", "float32", "bool_", "inf", "nan"}
USE = re.compile(r"\b(?:np|numpy)\.(\w+)")
OTHER_IMPORT = re.compile(r"^[^\S\n]*from\s+numpy\b|^[^\S\n]*import\s+numpy\.", re.MULTILINE)

inf, nan = math.inf, math.nan


def can_stand_in(program: str) -> bool:
    """Return whether all that a program uses of numpy is in NAMES."""
    return set(USE.findall(program)) <= NAMES and not OTHER_IMPORT.search(program)


class ndarray:
    """The type numpy.ndarray. No value has this type here."""


float64, float32, bool_ = float, float, bool


def isclose(value: Any, expected: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Return whether two numbers differ by at most atol + rtol * |expected|."""
    if isinstance(value, complex) or isinstance(expected, complex):
        return abs(value - expected) <= atol + rtol * abs(expected)
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        raise TypeError(f"{value!r} and {expected!r} are not both numbers")
    if math.isnan(value) or math.isnan(expected):
        return equal_nan and math.isnan(value) and math.isnan(expected)
    if math.isinf(value) or math.isinf(expected):
        return value == expected
    return abs(value - expected) <= atol + rtol * abs(expected)


def allclose(value: Any, expected: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Return whether numbers, or nested lists and tuples of the same lengths, are close."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(
            allclose(item, expected_item, rtol, atol, equal_nan) for item, expected_item in pairs
        )
    return isclose(value, expected, rtol, atol, equal_nan)


class testing:
    """The module numpy.testing."""

    @staticmethod
    def assert_allclose(value: Any, expected: Any, rtol: float = 1e-07, atol: float = 0.0, equal_nan: bool = True) -> None:
        """Raise AssertionError unless values are close."""
        if not allclose(value, expected, rtol, atol, equal_nan):
            raise AssertionError(f"{value!r} is not close to {expected!r}")
