"""The intervals hold the true score in about 95% of simulated evaluations, and comparisons seldom raise a false alarm."""

import math

import pytest

from tests.evaluation import coverage

TRIALS = 1000
ERRORS = 3  # standard errors of a simulated share


@pytest.mark.full
@pytest.mark.parametrize("case", [*coverage.cases()], ids=lambda case: case.name)
def test_intervals_hold_the_true_score(case):
    error = ERRORS * math.sqrt(0.05 * 0.95 / TRIALS)
    assert len(case.sizes) >= 2
    for n in case.sizes[:2]:
        assert coverage.COVERED[0] - error < coverage.coverage(case, n, TRIALS, seed=1) < coverage.COVERED[1] + error


@pytest.mark.full
def test_macro_averages_hold_the_true_score():
    assert 0.93 < coverage.macro_coverage(TRIALS, seed=1) < 0.985


@pytest.mark.full
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("shape", coverage.SHAPES)
def test_comparisons_of_equal_models_seldom_raise_an_alarm(shape, samples):
    found = coverage.verdicts(shape, samples, 100, TRIALS // 2, seed=1)
    alarm = 1 - found["cannot tell"]
    assert alarm < coverage.FALSE_ALARMS + ERRORS * math.sqrt(0.05 * 0.95 * 2 / TRIALS)


def test_a_better_model_is_found():
    assert coverage.verdicts("even", 4, 200, 20, shift=0.8)["better"] > 0.9
