"""Runs with rewards for single turns: both credits, a critic, turns in the rollouts' files, and a kill."""

import math

import pytest

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, ROOT, Fault, Run, submit

SEVERAL = (
    "grpo.max_rollout_turns=3",
    "policy.generation.max_new_tokens=6",
    "env.digits.kind=tests.end_to_end.environment.Drill",
    "grpo.max_num_steps=3",
    "policy.generation.max_num_seqs=1",  # else an environment's time decides which requests share a step, and its rounding
)
CREDITS = ("episode", "turn")
BY_TURN = (*SEVERAL, "grpo.credit=turn", "grpo.turn_discount=0.9", "grpo.mask_malformed_turns=true")
CRITIC = ("algorithm=ppo", f"value.model_name={ROOT / 'recipes/tiny'}", "value.random_init=true")


def completed(folder, *overrides) -> Run:
    run = submit(folder, *LOCAL, *overrides)
    assert run.status == 0, run.output
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    return completed(tmp_path_factory.mktemp("credit") / "whole", *BY_TURN)


@pytest.mark.full  # by default without a run: tests/algorithms/test_turn_credit.py
def test_the_rollouts_have_the_rewards_of_turns(whole):
    lines = whole.metrics()
    assert len({line["train/loss"] for line in lines}) == 3 and any(0 < line["train/malformed_turns"] < 1 for line in lines)
    found = [line for path in sorted((whole.folder / "rollouts").glob("step_*.jsonl")) for line in read_rollouts(path)]
    several = [line for line in found if len(line["turns"]) == 3]
    assert len(several) > 20 and len({turn["reward"] for line in several for turn in line["turns"]}) > 5
    for line in several:
        assert math.isclose(sum(turn["reward"] for turn in line["turns"]), line["reward"], abs_tol=1e-12)
        assert all(turn.get("malformed", False) == (turn["reward"] == 0) for turn in line["turns"])


@pytest.mark.full  # by default with one turn: test_kill.py
def test_a_killed_run_resumes_bit_for_bit(tmp_path, whole):
    broken = submit(tmp_path / "run", *LOCAL, *BY_TURN, fault=Fault("step", victim=0, count=5))
    assert broken.status == 1 and len(broken.metrics()) == 2, broken.output
    assert completed(tmp_path / "run", *BY_TURN).metrics() == whole.metrics()


@pytest.mark.full  # by default without a run: tests/algorithms/test_turn_credit.py
def test_credits_differ_only_where_episodes_have_several_turns(tmp_path, uninterrupted):
    one = completed(tmp_path / "one", "grpo.max_rollout_turns=2", "grpo.credit=turn")
    assert one.metrics() == uninterrupted
    whole, by_turn = (
        completed(tmp_path / credit, *SEVERAL, f"grpo.credit={credit}").metrics() for credit in ("episode", "turn")
    )
    assert whole[0]["train/reward"] == by_turn[0]["train/reward"] and whole[0]["train/loss"] != by_turn[0]["train/loss"]


@pytest.mark.full
def test_a_critic_learns_from_rewards_of_turns(tmp_path):
    keys = (*CRITIC, *(key.replace("grpo.", "ppo.") for key in SEVERAL), "ppo.num_prompts_per_step=16")
    runs = {credit: completed(tmp_path / credit, *keys, f"ppo.credit={credit}").metrics() for credit in CREDITS}
    first = [runs[credit][0] for credit in runs]
    assert first[0]["train/reward"] == first[1]["train/reward"] and first[0]["train/loss"] != first[1]["train/loss"]
    assert len({line["train/loss"] for line in runs["turn"]}) == 3
