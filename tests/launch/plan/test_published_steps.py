"""NeMo-RL's published steps fit their GPUs in our plan, and recipes/hardware has the range of published / planned seconds."""

import pytest

from pipeline.config import hardware
from tests.benchmarks import plan_published
from tests.benchmarks.plan_published import LINES, predicted, ratio

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def plans():
    return {line.what: predicted(line) for line in LINES}


def test_every_published_step_fits(plans):
    assert len(plans) == len(LINES)
    assert {what: [*found.problems(), *found.warnings()] for what, found in plans.items() if not found.fits} == {}


@pytest.mark.parametrize("gpu", plan_published.GPUS)
def test_the_range_is_that_of_the_description(plans, gpu):
    ratios = [ratio(line, plans[line.what].step) for line in LINES if line.gpu == gpu]
    assumed = hardware.gpu(gpu).assumed
    assert (assumed.shortest_step, assumed.longest_step) == (round(min(ratios), 2), round(max(ratios), 2))


def test_steps_on_h100_are_within_a_factor_of_two(plans):
    ratios = {line.what: ratio(line, plans[line.what].step) for line in LINES if line.gpu == "h100"}
    assert sum(0.5 < found < 2 for found in ratios.values()) >= 13 and len(ratios) == 15, ratios
