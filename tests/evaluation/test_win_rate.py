"""The length-controlled win rate against closed forms and simulations."""

import numpy as np
import pytest

from pipeline.evaluation.win_rate import length_controlled


def rate(wins, lengths, difficulties=None, ridge_length=1e-9) -> float:
    return float(length_controlled(wins, lengths, difficulties, ridge_length).mean())


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(("long", "short"), [(0.75, 0.25), (0.9, 0.6), (0.5, 0.5), (0.3, 0.05), (0.99, 0.5)])
def test_two_lengths_have_a_closed_form(long, short):
    """With d = +-c the model has one logit for each length, and the rate is the sigmoid of their mean."""
    for n in (100, 200):
        wins = [1.0] * round(long * n) + [0.0] * round((1 - long) * n) + [1.0] * round(short * n)
        wins += [0.0] * (2 * n - len(wins))
        lengths = [40.0] * n + [-40.0] * n
        expected = sigmoid((logit(long) + logit(short)) / 2)
        assert rate(wins, lengths) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("lengths", [[0.0] * 10, [7.0] * 10])
def test_equal_differences_of_length_leave_the_win_rate(lengths):
    wins = [1, 1, 1, 0.5, 0.5, 0, 0, 1, 1, 1]
    assert rate(wins, lengths) == pytest.approx(0.7, abs=1e-5)


def test_soft_verdicts_count_as_so_many_wins():
    soft = rate([0.75, 0.25, 0.5, 0.5], [10, -10, 10, -10])
    hard = rate([1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], [10] * 4 + [-10] * 4 + [10] * 4 + [-10] * 4)
    assert soft == pytest.approx(hard, abs=1e-6) == pytest.approx(0.5, abs=1e-6)


def test_a_judge_without_a_preference_gives_exactly_a_half():
    values = length_controlled([0.5] * 9, [1, 2, 3, 40, 5, -6, 7, 8, 9])
    assert values.tolist() == [0.5] * 9


@pytest.mark.parametrize(("wins", "near"), [([1.0] * 20, 1.0), ([0.0] * 20, 0.0)])
def test_one_model_always_wins(wins, near):
    assert rate(wins, range(-10, 10)) == pytest.approx(near, abs=1e-3)


def test_length_alone_decides():
    lengths = [*range(-10, 0), *range(1, 11)]
    value = rate([float(d > 0) for d in lengths], lengths, ridge_length=1e-3)
    assert value == pytest.approx(0.5, abs=1e-6)


def test_the_sides_are_symmetric():
    generator = np.random.default_rng(0)
    wins, lengths, hard = generator.random(50), generator.normal(3, 20, 50), generator.normal(size=50)
    assert rate(wins, lengths, hard) + rate(1 - wins, -lengths, hard) == pytest.approx(1, abs=1e-6)


def test_a_longer_model_loses_its_advantage_of_length():
    """theta = 0: the answers are as good, and longer ones win more often."""
    generator = np.random.default_rng(1)
    lengths = generator.normal(1.0, 1.0, 20_000)
    spread = lengths.std()
    wins = generator.random(20_000) < sigmoid(2 * np.tanh(lengths / spread))
    assert wins.mean() > 0.7
    assert rate(wins, lengths) == pytest.approx(0.5, abs=0.02)


def test_difficulties_are_used():
    generator = np.random.default_rng(2)
    lengths, hard = generator.normal(size=20_000), generator.normal(size=20_000)
    p = sigmoid(0.4 + 1.5 * np.tanh(lengths / lengths.std()) - 1.2 * hard)
    wins = generator.random(20_000) < p
    assert rate(wins, lengths, hard) == pytest.approx(sigmoid(0.4 - 1.2 * hard).mean(), abs=0.01)


def test_the_spread_of_the_values_is_that_of_the_rate():
    generator = np.random.default_rng(3)
    n, inside, truth = 300, 0, sigmoid(0.3)
    for _ in range(400):
        lengths = generator.normal(0.5, 1.0, n)
        wins = generator.random(n) < sigmoid(0.3 + np.tanh(lengths / lengths.std()))
        values = length_controlled(wins, lengths)
        inside += abs(values.mean() - truth) < 1.96 * values.std(ddof=1) / np.sqrt(n)
    assert 0.92 < inside / 400 < 0.98


def test_no_verdicts():
    assert length_controlled([], []).shape == (0,)
