"""Runs with a rollout function of the user."""

import pytest

from tests.end_to_end.runs import LOCAL, Fault, submit

FUNCTIONS = "tests.rollout.rollout_functions"
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=1",
    "loss_fn.use_importance_sampling_correction=true",
)


def test_the_built_in_rollout_as_a_function_has_its_curve(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, f"rollout={FUNCTIONS}.answer")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted


@pytest.mark.full
@pytest.mark.parametrize("in_flight", ["true", "false"])
def test_functions_sample_ahead_and_resume_after_a_kill(tmp_path, in_flight):
    """With several turns, in-flight refits or drains, and a rank that is killed while functions play."""
    options = (*LOCAL, *ASYNC, f"grpo.async_grpo.in_flight_weight_updates={in_flight}", "grpo.max_rollout_turns=2")
    killed = Fault("receive", victim=3, actor=2, count=3, once=True)
    run = submit(
        tmp_path / "run", *options, f"rollout={FUNCTIONS}.twice", "cluster.requeue.max_restarts=2", fault=killed, timeout=300
    )
    assert run.status == 0, run.output
    lines = [line for line in run.metrics() if "train/reward" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and len(run.verdicts()) == 2
    assert not any(line["train/env_failures"] or line["train/broke_judge"] for line in lines)


@pytest.mark.full
def test_the_curve_is_the_same_on_shared_gpus(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, "policy.generation.colocated.enabled=true", f"rollout={FUNCTIONS}.answer")
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted
