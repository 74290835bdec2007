"""The expression language of gates: its values, and its errors."""

import pytest

from launch.sweeps.expressions import Curve, Expression, NoValue

CURVES = {
    "t": Curve([1, 2, 3, 5], [4.0, 1.0, 2.0, 3.0]),
    "val/acc": Curve([0, 5], [0.5, 0.75]),
    "broken": Curve([1, 2, 3], [1.0, None, 3.0]),
    "a-b.c/d_1:2": Curve([1], [7.0]),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("first(t)", 4),
        ("last(t)", 3),
        ("min(t)", 1),
        ("max(t)", 4),
        ("mean(t)", 2.5),
        ("median(t)", 2.5),
        ("at(t, 2)", 1),
        ("at(val/acc, 0)", 0.5),
        ("quantile(t, 0)", 1),
        ("quantile(t, 0.5)", 2.5),
        ("quantile(t, 1)", 4),
        ("quantile(t, 0.1)", 1.3),
        ("area(t)", ((4 + 1) / 2 + (1 + 2) / 2 + 2 * (2 + 3) / 2) / 4),
        ("area(a-b.c/d_1:2)", 7),
        ("mean(t, last=2)", 2.5),
        ("max(t, from=2)", 3),
        ("max(t, from=2, to=3)", 2),
        ("mean(t, to=3, last=2)", 1.5),
        ("last(broken, from=3)", 3),
        ("first(broken, to=1)", 1),
        ("last(val/acc) - at(val/acc, 0)", 0.25),
        ("last(val/acc) / last(t)", 0.25),
        ("1 - 2 - 3 + 0 * last(t)", -4),
        ("2 * (last(t) + 1)", 8),
        ("-last(t)", -3),
        ("1 + 2 * 3 - 0*last(t)", 7),
        ("8 / 4 / 2 + 0*last(t)", 1),
        ("1e1+.5 * 2.0", 11),
    ],
)
def test_values(text, value):
    assert Expression(text).value(CURVES) == pytest.approx(value, rel=1e-15)


def test_the_metrics_of_an_expression_are_listed_in_order():
    assert Expression("(last(a/b) - 2) / mean(c) + at(a/b, 1)").metrics == ["a/b", "c"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("last(val/ac)", "metrics.jsonl has no val/ac; did you mean val/acc?"),
        ("last(xyz)", "metrics.jsonl has no xyz"),
        ("at(t, 4)", "t has no value from step 4 to step 4; it has values from step 1 to 5"),
        ("mean(t, from=6)", "t has no value from step 6"),
        ("mean(t, from=3, to=2)", "t has no value from step 3 to step 2"),
        ("mean(t, last=5)", "t has 4 values; expected at least 5 for last=5"),
        ("mean(broken)", "broken is not a finite number at step 2"),
        ("at(broken, 2)", "broken is not a finite number at step 2"),
        ("last(t) / (first(val/acc) - 0.5)", "division by 0"),
    ],
)
def test_an_expression_without_a_value_has_a_reason(text, said):
    with pytest.raises(NoValue) as error:
        Expression(text).value(CURVES)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "last",
            "last()",
            "last(3)",
            "last(t",
            "last(t))",
            "last(t) 2",
            "last(t) +",
            "(last(t)",
            "True",
            "1j",
            "'t'",
            "t",
        ),
        *("at(t)", "at(t, last=2)", "at(t, 1, last=2)", "at(t, 3, 4)", "quantile(t)", "quantile(t, 1.5)", "mean(t, 3)"),
        *(
            "mean(t, lst=3)",
            "mean(t, last=3, last=4)",
            "mean(t, last=0)",
            "mean(t, from=1.5)",
            "mean(t, last=x)",
            "mean(t, **t)",
        ),
        *("mean(t, *t)", "mean(t, last=1e999)", "last(t) ** 2", "last(t) // 2", "last(t).real", "last(t)[0]", "last(last(t))"),
        *("mean('t')", 'mean("t")', "mean(b't')", "mean(f't')", "mean(f'{1}')", "mean('''t''')", "last(t) # t"),
        *("__import__('os').system('true')", "(lambda: 1)()", "[last(t)]", "1" * 400, "-" * 2000 + "last(t)", "a\0b"),
    ],
)
def test_an_invalid_expression_is_refused(text):
    with pytest.raises(ValueError):
        Expression(text)


def test_a_misspelt_statistic_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"^'lst\(t\)' is not an expression: got 'lst'; expected a statistic: first"):
        Expression("lst(t)")
