"""Prompts are chosen by how well the policy answers them, and a resumed run chooses the same."""

import json

import numpy as np
import pytest

from pipeline.config import RECIPES, complete
from pipeline.data.chat import load_tokenizer
from pipeline.data.curriculum import Curriculum, Pool
from pipeline.data.mixture import build_streams
from pipeline.types import Prompt, Rollout, RolloutGroup
from tests.problems import refused

RECORDS = 40
SETTINGS = {"enabled": True, "easy": 0.9, "hard": 0.1, "easy_share": 0.0, "hard_share": 0.25}


def stream(folder, sets=1, **settings):
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"input": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(RECORDS)))
    one = {"data_path": str(path), "output_key": "answer", "env_name": "sums"}
    data = {"train": one} if sets == 1 else {"train": None, "datasets": {f"set{i}": one for i in range(sets)}}
    values = {
        "name": "chosen",
        "algorithm": "grpo",
        "policy": {"model_name": str(RECIPES / "tiny"), "max_total_sequence_length": 64},
        "env": {"sums": {"kind": "exact_match"}},
        "data": {
            **data,
            "apply_chat_template": False,
            "curriculum": SETTINGS | settings if settings.get("enabled", True) else {},
        },
    }
    recipe = complete(values)
    return build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))[0]


def judged(prompt: Prompt, reward: float, failure: str = "") -> RolloutGroup:
    rollouts = tuple(Rollout((), right, failure=failure) for right in (reward, reward))
    return RolloutGroup(prompt, rollouts)


def difficulty(prompt: Prompt) -> float:
    """Return the reward of a policy that knows small numbers, is sure of the smallest, and never learns the large ones."""
    return 1.0 if prompt.record < 10 else 0.0 if prompt.record >= 30 else 0.5


def taken(prompts, steps, per_step=4, reward=difficulty):
    found = []
    for _ in range(steps):
        batch = prompts.take(per_step)
        found += [(prompt.index, prompt.dataset, prompt.record, prompt.task["answer"]) for prompt in batch]
        prompts.observe([judged(prompt, reward(prompt)) for prompt in batch])
    return found


def test_records_leave_and_return(tmp_path):
    prompts = stream(tmp_path)
    assert isinstance(prompts, Curriculum)
    found = taken(prompts, 40)
    assert [index for index, *_ in found] == list(range(160))
    assert all(answer == str(record + 1) for _, _, record, answer in found)
    assert prompts.metrics["curriculum/easy"] == 10 and prompts.metrics["curriculum/hard"] == 10
    later = [record for _, _, record, _ in found[80:]]
    assert not any(record < 10 for record in later)
    share = sum(record >= 30 for record in later) / len(later)
    assert 0.1 < share < 0.4  # hard_share is 0.25
    assert {record for record in later if record < 30} == set(range(10, 30))
    taken(prompts, 40, reward=lambda prompt: 0.5)  # the policy learns the hard ones
    assert prompts.metrics["curriculum/hard"] == 0 and prompts.metrics["curriculum/easy"] == 10


@pytest.mark.parametrize("sets", [1, 2])
def test_a_resumed_run_takes_the_same_prompts(tmp_path, sets):
    whole = taken(stream(tmp_path, sets), 30)
    for step in (1, 7, 15, 29):
        first = stream(tmp_path, sets)
        before = taken(first, step)
        state = json.loads(json.dumps(first.state_dict()))
        second = stream(tmp_path, sets)
        second.load_state_dict(state)
        assert before + taken(second, 30 - step) == whole
    assert len({index for index, *_ in whole}) == len(whole)


def test_a_state_without_a_curriculum_continues(tmp_path):
    plain = stream(tmp_path, enabled=False)
    plain.take(13)
    prompts = stream(tmp_path)
    prompts.load_state_dict(plain.state_dict())
    assert [prompt.index for prompt in prompts.take(2)] == [13, 14]
    assert prompts.metrics == {"curriculum/easy": 0.0, "curriculum/hard": 0.0, "curriculum/passed_over": 0.0}


def test_a_run_with_a_curriculum_does_not_continue_without(tmp_path):
    prompts = stream(tmp_path)
    prompts.take(3)
    with refused(("data.curriculum.enabled", "run-exists")):
        stream(tmp_path, enabled=False).load_state_dict(prompts.state_dict())


def test_when_every_record_is_easy_the_stream_goes_on(tmp_path, caplog):
    prompts = stream(tmp_path)
    found = taken(prompts, 30, reward=lambda prompt: 1.0)
    assert len(found) == 120 and "all records of an epoch are easy or hard" in caplog.text


def test_groups_without_a_reward_change_nothing(tmp_path):
    prompts = stream(tmp_path)
    batch = prompts.take(8)
    prompts.observe([judged(prompt, 1.0, failure="no judge") for prompt in batch])
    assert prompts.metrics["curriculum/easy"] == 0


def test_a_pool_is_a_set_in_an_order():
    pool, model, draw = Pool([3, 5]), [3, 5], np.random.default_rng(0)
    for _ in range(2000):
        record = int(draw.integers(30))
        if record in pool:
            pool.remove(record)
            model.remove(record)
        else:
            pool.add(record)
            model.append(record)
        assert sorted(pool.records) == sorted(model) and len(pool) == len(model)
        assert all(pool.records[pool._places[one]] == one for one in pool.records)


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"hard": 0.95}, "data.curriculum.hard"), ({"easy_share": 0.8}, "data.curriculum.hard_share")],
)
def test_contradictions(tmp_path, settings, key):
    with refused((key, "too-large")):
        stream(tmp_path, **settings)
