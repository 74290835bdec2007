"""Whole runs that a generative judge on ranks of its own rewards."""

from pathlib import Path

import pytest

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Fault, left_alive, pids_of, submit
from tests.evaluation.said_models import write_model

SAYS = {
    "<a>": "Score: 7",
    "<b>": "Score: 2",
    "<y>": "Verdict: yes",
    "<n>": "Verdict: no",
    "<r>": "It is short.\nBrevity: 9\nSense: 4",
    "<s>": "Brevity: 1\nSense: 5",
    "<t>": "Verdict: B",
    "<g>": "I cannot say.",
}
"""What the judge says after a token of its chat template."""
TEMPLATE = """{% set asked = messages[0]['content'] %}{{ asked }}\
{% set odd = asked | length % 2 %}{% if 'dull' in asked %}<g>{% elif 'criteria' in asked %}{{ '<r>' if odd else '<s>' }}\
{% elif 'Compare two' in asked %}<t>{% elif 'yes or no' in asked %}{{ '<y>' if odd else '<n>' }}\
{% else %}{{ '<a>' if odd else '<b>' }}{% endif %}"""
REWARDS = """[
    {fn: llm_judge, name: score, weight: 2},
    {fn: llm_judge, name: right, kwargs: {rating: yes_no, second_prompt: 'yes or no, {response}?'}},
    {fn: llm_judge, name: form, kwargs: {rating: rubric, criteria: [{name: Brevity, weight: 3}, {name: Sense}]}},
    {fn: llm_judge, name: better, kwargs: {rating: pairwise, reference: input, request: {temperature: 1, top_p: 0.9}}},
]""".replace("\n", " ")
APART = ("grpo.max_num_steps=2", "grpo.val_period=0", "cluster.judge.ranks_per_node=1", "policy.generation.backend=vllm")
RANK = 4  # of the judge, after two train and two generate ranks


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[str, ...]:
    """Return the keys of a recipe with four rewards by one judge."""
    judge: Path = write_model(tmp_path_factory.mktemp("judge"), TEMPLATE, says=SAYS, longest=4096)
    engine = "{max_model_len: 3000, enforce_eager: true}, vllm_kwargs: {kv_cache_memory_bytes: 67108864}"
    environment = f"env.judged={{timeout_s: 60, workers: 4, rewards: {REWARDS}}}"
    served = f"judge={{model_name: {judge}, max_num_seqs: 16, vllm_cfg: {engine}}}"
    return served, environment, "data.train.env_name=judged", *APART


@pytest.fixture(scope="module")
def judged(keys, tmp_path_factory):
    run = submit(tmp_path_factory.mktemp("judged") / "run", *LOCAL, *keys)
    assert run.status == 0, run.output
    return run


def test_a_judge_on_a_rank_of_its_own_rewards_two_steps(judged):
    lines = judged.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    rollouts = read_rollouts(judged.folder / "rollouts/step_000001.jsonl")
    assert len(rollouts) == 16
    for rollout in rollouts:
        given = {name: rollout[f"reward/{name}"] for name in ("score", "right", "form", "better")}
        assert given["score"] in (0.7, 0.2) and given["better"] == 0.5  # always the second of two: a tie of both orders
        assert given["right"] in (0, 1) and given["form"] in (pytest.approx(0.775), pytest.approx(0.2))
        assert rollout["reward"] == pytest.approx(2 * given["score"] + given["right"] + given["form"] + given["better"])
        assert rollout["notes"]["score/judge_reply"] in ("Score: 7", "Score: 2")
        assert rollout["notes"]["score/judge_prompt"].startswith("The texts to judge stand between")
    assert len({rollout["reward/score"] for rollout in rollouts}) == 2  # it depends on the answer


@pytest.mark.full
def test_a_killed_judge_is_named_and_the_resumed_run_repeats_every_rating(keys, judged, tmp_path):
    """With rewards that are sampled at temperature 1."""
    fault = Fault("decode", RANK, actor=RANK, count=3)
    broken = submit(tmp_path / "run", *LOCAL, *keys, fault=fault)
    assert broken.status == 1, broken.output
    assert (pids_of(broken.folder) / "done").exists(), "the fault never struck"
    assert f"rank {RANK} (judge) was ended by SIGKILL" in broken.output
    assert left_alive(broken.folder) == []
    rerun = submit(tmp_path / "run", *LOCAL, *keys)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == judged.metrics()
    for step in (1, 2):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (rerun.folder / name).read_text() == (judged.folder / name).read_text()


@pytest.mark.full
def test_a_judge_that_says_nothing_costs_the_episodes_alone(keys, tmp_path):
    """The answer is to blame if the judge rates an empty one; else the episode is dropped."""
    rewards = "[{fn: llm_judge, name: dull, kwargs: {tries: 1, prompt: 'Is {response} dull?'}}]"
    run = submit(tmp_path / "run", *LOCAL, *keys, f"env.judged={{_override_: true, timeout_s: 60, rewards: {rewards}}}")
    assert run.status == 0, run.output
    assert [line["train/env_failures"] for line in run.metrics()] == [16, 16]


@pytest.mark.full
def test_train_and_generate_ranks_may_take_turns_on_their_gpus(keys, judged, tmp_path):
    run = submit(tmp_path / "run", *LOCAL, *keys, "policy.generation.colocated.enabled=true")
    assert run.status == 0, run.output
    assert run.metrics() == judged.metrics()
