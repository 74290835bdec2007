import time

import pytest

from pipeline.environments.calculator import MAX_CHARACTERS, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47*85", "3995"),
        (" 2 + 3 * 4 ", "14"),
        ("-(2+3)*+4", "-20"),
        ("2^10", "1024"),
        ("2**-2", "0.25"),
        ("-2**2", "-4"),  # as in mathematics and Python
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("0.1+0.2", "0.3"),  # fractions, not floats
        ("1/3", "0.333333333333"),
        ("1/3*3", "1"),
        ("sqrt(16)", "4"),
        ("abs(2-5)", "3"),
        ("2**0.5", "1.41421356237"),
        ("6\u00d77\u00f72", "21"),
        ("123456789123456789*1000000007", "123456789987654312864197523"),
    ],
)
def test_values(expression: str, value: str):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not an arithmetic expression"),
        ("3 4", "not an arithmetic expression"),
        ("\0", "not an arithmetic expression"),
        ("x+1", "'x' is not arithmetic"),
        ("__import__('os').getpid()", "is not arithmetic"),
        ("(1).__class__", "is not arithmetic"),
        ("[1][0]", "is not arithmetic"),
        ("pow(2, 3)", "is not arithmetic"),
        ("abs(1, 2)", "is not arithmetic"),
        ("True+1", "'True' is not arithmetic"),
        ("'a'*9", "is not arithmetic"),
        ("1j", "is not arithmetic"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("sqrt(0-1)", "root of a negative number"),
    ],
)
def test_expressions_without_a_value(expression: str, message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**(10**300)",
        "0.5**10000",
        "1e999999",
        "1e-999999",
        "sqrt(10**1000)",
        "9" * 200 + "**9",
        "*".join(["9" * 60] * 4 + ["(" + "9**1000)"] * 4),
        "((((10**600)**2)**2)**2)",
        "(" * 200 + "1" + ")" * 40,
        "-" * 250 + "1",
        "1" * (MAX_CHARACTERS + 1),
    ],
)
def test_time_and_size_are_bounded(expression: str):
    start = time.process_time()
    try:
        assert len(evaluate(expression)) < 2000
    except ValueError as error:
        assert len(str(error)) < 400
    assert time.process_time() - start < 0.5


def test_powers_of_one_may_have_any_exponent():
    assert evaluate("1**(10**300)") == evaluate("(0-1)**(10**300)") == "1"
