"""Intervals and comparisons against known values; `python -m tests.evaluation.coverage` simulates them."""

import math
import random

import numpy as np
import pytest

from pipeline.evaluation.statistics import SHARE, Scale, difference, interval, macro_interval, mcnemar, pass_at, t_quantile


def test_wilson_of_single_answers():
    found = interval([[1]] * 15 + [[0]] * 5)  # Wilson (1927) at 95%: R, binom.confint(15, 20, methods = "wilson")
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.531299, 0.888138), abs=1e-5)
    none, all_ = interval([[0]] * 30), interval([[1]] * 30)
    assert (none.low, all_.high) == (0, 1) and none.high == pytest.approx(1 - all_.low) == pytest.approx(0.11351, abs=1e-5)


def test_samples_of_a_question_are_one_cluster():
    """Equal answers of a question count once, independent ones each."""
    once, copied = interval([[1]] * 60 + [[0]] * 40), interval([[1] * 8] * 60 + [[0] * 8] * 40)
    assert copied.high - copied.low == pytest.approx(once.high - once.low, rel=0.02)
    draw = np.random.default_rng(0)
    independent = interval((draw.random((100, 8)) < 0.6).astype(float).tolist())
    assert independent.high - independent.low == pytest.approx((once.high - once.low) / math.sqrt(8), rel=0.15)


def test_real_values_have_a_bootstrap_interval():
    values = np.random.default_rng(0).normal(7, 2, 200)
    found = interval([[value] for value in values.tolist()])
    half = 1.96 * 2 / math.sqrt(200)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.06)
    assert interval([[3.5]]).value == 3.5 and math.isnan(interval([[3.5]]).low)
    assert interval([[3.5], [3.5]]).high == 3.5 and math.isnan(interval([]).value)


def test_no_interval_depends_on_the_order():
    draw = random.Random(0)
    for values in ([[draw.random(), draw.random()] for _ in range(50)], [[draw.gauss(3, 9)] for _ in range(50)]):
        shuffled = values[:]
        draw.shuffle(shuffled)
        assert interval(values) == interval(shuffled)
        named = {f"q{i}": value for i, value in enumerate(values)}
        other = {f"q{i}": [each + 0.1 * draw.random() for each in value] for i, value in enumerate(values)}
        assert difference(named, other) == difference(dict(reversed(named.items())), other)


def test_macro_average_weighs_groups_equally():
    groups = [[[1.0]] * 90 + [[0.0]] * 10, [[1.0]] * 5 + [[0.0]] * 5]
    found = macro_interval(groups)
    assert found.value == pytest.approx(0.7) and found.low < 0.6 < 0.8 < found.high
    error = math.sqrt((0.9 * 0.1 / 100 + 0.25 / 10) / 4)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.25)
    assert macro_interval([[[1.0]], [[0.0]]]).value == 0.5


def test_pass_at_k_is_unbiased():
    scores = {"one of four": [1, 0, 0, 0], "parts of the tests": [0, 0.99], "unjudged": [1]}
    assert pass_at(scores, 1) == {"one of four": [0.25], "parts of the tests": [0.0], "unjudged": [1.0]}
    assert pass_at(scores, 2) == {"one of four": [0.5], "parts of the tests": [0.0]}
    draw = np.random.default_rng(0)
    answers = (draw.random((20_000, 8)) < 0.2).astype(int).tolist()
    means = pass_at({str(i): row for i, row in enumerate(answers)}, 4)
    assert interval(means.values()).value == pytest.approx(1 - 0.8**4, abs=0.01)


def test_t_quantiles():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    assert {freedom: t_quantile(freedom) for freedom in table} == pytest.approx(table, rel=2e-5)
    scipys = {0.5: 164.55767348048818, 1.2: 8.648826510748867, 1.5: 6.016663104427929, 1.9: 4.527118077100328}
    scipys |= {2.4: 3.683504289675019, 2.5: 3.5746548420036817, 3.7: 2.8675207071911895, 7.3: 2.345066736547703}
    scipys |= {100: 1.9839715185235518, 1000: 1.9623390808264083, 1e6: 1.959966356814107}
    assert {freedom: t_quantile(freedom) for freedom in scipys} == pytest.approx(scipys, rel=1e-9)


def test_mcnemar_against_the_binomial():
    assert mcnemar(0, 0) == 1 and mcnemar(7, 7) == pytest.approx(1, abs=0.2)
    exact = 2 * sum(math.comb(12, i) for i in range(3)) / 2**12  # two-sided, of 2 in 12
    assert mcnemar(10, 2) == mcnemar(2, 10) == pytest.approx(exact - math.comb(12, 2) / 2**12)
    assert mcnemar(3000, 3200) == pytest.approx(math.erfc(200 / math.sqrt(6200) / math.sqrt(2)), rel=1e-2)


def test_verdicts():
    first = {f"q{i}": [float(i % 2)] for i in range(100)}
    better = first | {f"q{i}": [1.0] for i in range(0, 30, 2)}
    found = difference(first, better)
    assert (found.verdict, found.gained, found.lost, found.questions) == ("better", 15, 0, 100)
    assert found.value == pytest.approx(0.15) and 0 < found.low < 0.15 < found.high
    assert difference(better, first).verdict == "worse"
    assert difference(first, first).verdict == difference(first, first | {"q0": [1.0]}).verdict == "cannot tell"
    assert difference(first, {"another": [1.0]}).questions == 0
    several = {question: value * 4 for question, value in first.items()}
    assert difference(several, {question: [0.5, *value[1:]] for question, value in several.items()}).verdict == "cannot tell"
    assert difference(several, {question: [1.0, *value[1:]] for question, value in several.items()}).verdict == "better"


def pair(changes: list[float]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return two evaluations of a question for each difference."""
    first = {f"q{i}": [float(change < 0)] for i, change in enumerate(changes)}
    return first, {f"q{i}": [(change < 0) + change] for i, change in enumerate(changes)}


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ([1] * 2 + [0] * 10, -0.1, 0.45),
        ([-1] * 2 + [0] * 10, -0.45, 0.1),
        ([1] + [0] * 11, -0.15, 0.35),
        ([1, 0], -1, 1),
        ([1, -1], -1, 1),
        ([1] * 12, 0.4, 1),
        ([-1] * 2, -1, 1),
        ([0.5] * 3 + [-0.25] * 3, -0.5, 0.75),
        ([0] * 12, 0, 0),
    ],
)
def test_differences_of_scores_from_0_to_1_stay_from_minus_1_to_1(changes, low, high):
    found = difference(*pair(changes))
    assert found.value == pytest.approx(sum(changes) / len(changes))
    assert -1 <= low <= found.low <= found.value <= found.high <= high <= 1


def test_a_single_question_gives_no_interval():
    for change in (1, 0, 0.5):
        found = difference(*pair([change]))
        assert (found.questions, found.verdict, found.shown) == (1, "cannot tell", f"{change:+.4f} [-]")
        assert math.isnan(found.low) and math.isnan(found.high)


def test_intervals_have_possible_ends():
    """Of a perplexity of few, unequal texts; of weighted shares; of ratings near the end of their scale."""
    nats, words = [2_000.0, 30.0, 25.0, 20.0], [40.0, 10.0, 9.0, 8.0]
    ratio = sum(nats) / sum(words)
    deviations = [(n - ratio * w) / (sum(words) / 4) for n, w in zip(nats, words, strict=True)]
    values = {str(i): [math.exp(ratio) * (1 + each)] for i, each in enumerate(deviations)}
    found = interval(values.values(), Scale(1.0, exponential=True))
    of_nats = interval([[ratio + each] for each in deviations])
    assert found.value == pytest.approx(math.exp(ratio)) and 1 <= found.low < found.value < found.high
    assert found.high == pytest.approx(math.exp(of_nats.high)) and found.low == pytest.approx(max(1.0, math.exp(of_nats.low)))
    assert interval(values.values()).low < 0  # without the map
    assert macro_interval([values.values(), values.values()], Scale(1.0, exponential=True)).low >= 1
    weighted = interval([[2.5]] * 3 + [[0.4]] * 5 + [[0.0]] * 2, SHARE)
    assert weighted.value == pytest.approx(0.95) and 0 <= weighted.low < 0.95 < weighted.high <= 1
    rated = interval([[10.0]] * 5 + [[9.0], [4.0]], Scale(1.0, 10.0))
    assert rated.value == pytest.approx(9.0) and 1 <= rated.low < 9 < rated.high <= 10
    assert interval([[0.1], [0.0], [9.0], [0.2]], Scale(0.0)).low >= 0
    assert math.isnan(interval([[1e300], [1e305]], Scale(1.0, exponential=True)).high)  # above the largest float
    for scale in (Scale(1.0, exponential=True), Scale(0.0), Scale(1.0, 10.0)):  # a single text has no interval
        single = interval([[3.0]], scale)
        assert single.value == 3 and math.isnan(single.low) == math.isnan(single.high) == (not math.isfinite(scale.high))
    second = {name: [each / 2 for each in value] for name, value in values.items()}
    halved = difference(values, second, lower_is_better=True, exponential=True)
    assert halved.value == pytest.approx(-found.value / 2) and halved.low == halved.high == pytest.approx(halved.value)
    worse = {str(i): [math.exp(ratio + 1) * (1 + each * 1.5)] for i, each in enumerate(deviations)}
    assert difference(values, worse, exponential=True).low >= -found.value
