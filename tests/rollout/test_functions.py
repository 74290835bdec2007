"""Check rollout functions of users. See function_scenarios.py."""

import pytest

from tests.rollout import function_scenarios as scenarios


@pytest.mark.parametrize(
    "scenario",
    [scenarios.same, scenarios.branches, scenarios.limits, scenarios.refits, scenarios.cuts, scenarios.mistakes],
    ids=lambda scenario: scenario.__name__,
)
def test_a_scenario(play_in, checkpoint, scenario):
    """Run a scenario; its docstring says what must hold."""
    status, printed = play_in(scenario, checkpoint.folder)
    assert status == 0, printed[-4000:]
