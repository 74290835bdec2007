"""Check environments with agents. See agent_scenarios.py."""

import os

import pytest

from tests.rollout import agent_scenarios as scenarios


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return scenarios.save(tmp_path_factory.mktemp("letters"))


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_scenario(play_in, letters, scenario):
    """Run a scenario; its docstring says what must hold."""
    status, printed = play_in(scenario, letters)
    assert status == 0, printed[-4000:]
    if scenario is scenarios.misbehave:  # the log has the end of an agent's stderr, without our own lines
        raised = ('messages[0]["nothere"]', 'print("x" * 1000)')  # whichever fails first
        assert "\nstderr:\n" in printed and any(line in printed for line in raised)
        assert "environments/agent.py" not in printed


@pytest.mark.full
@pytest.mark.parametrize("scenario", scenarios.LONG, ids=lambda scenario: scenario.__name__)
def test_a_long_scenario(play_in, letters, scenario):
    """Run a scenario that needs gigabytes or minutes, or is covered in part by the others."""
    status, printed = play_in(scenario, letters, timeout_s=580)
    assert status == 0, printed[-4000:]


@pytest.mark.full
@pytest.mark.skipif("MINI_SWE_AGENT_PYTHON" not in os.environ, reason="MINI_SWE_AGENT_PYTHON names no Python")
def test_a_published_agent(play_in, letters):
    status, printed = play_in(scenarios.published, letters, os.environ["MINI_SWE_AGENT_PYTHON"])
    assert status == 0, printed[-4000:]
