"""Runs with a rollout function of the user."""

import pytest

from tests.end_to_end.runs import LOCAL, submit
from tests.end_to_end.test_async import AHEAD, IN_FLIGHT, SLOW, kill_and_rerun

FUNCTIONS = "tests.rollout.rollout_functions"


def test_the_built_in_rollout_as_a_function_has_its_curve(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, f"rollout={FUNCTIONS}.answer")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted


@pytest.mark.full
@pytest.mark.parametrize("ahead", [AHEAD, IN_FLIGHT], ids=["drained", "in flight"])
def test_a_kill_loses_no_rollout_and_repeats_none(tmp_path, ahead):
    """With two turns; after a long first turn there is no room for the second."""
    turns = (f"rollout={FUNCTIONS}.twice", "grpo.max_rollout_turns=2", "grpo.async_grpo.stragglers=keep")
    kill_and_rerun(tmp_path / "run", 0, 3, *ahead, *SLOW, *turns)


@pytest.mark.full
def test_the_curve_is_the_same_on_shared_gpus(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, "policy.generation.colocated.enabled=true", f"rollout={FUNCTIONS}.answer")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted
