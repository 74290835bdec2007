"""Whole runs whose rewards a model gives: wherever it is served the run is the same, and a rank that serves it may die."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Fault, left_alive, pids_of, submit

MODEL = "recipes/tiny"
SAME = ("grpo.max_num_steps=3", "grpo.val_period=2", "grpo.max_val_samples=8")
APART = ("env.judge.served_by=reward", "cluster.reward.ranks_per_node=2")
FIRST_OF_REWARD = 4  # after two train and two generate ranks


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[str, ...]:
    """Return the keys of a recipe with a reward model; it has the policy's tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(MODEL, num_labels=1))
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    judge = f"env.judge={{kind: reward_model, model_name: {folder}}}"
    return (judge, "data.train.env_name=judge", "data.validation.env_name=judge", *SAME)


@pytest.fixture(scope="module")
def on_train_ranks(keys, tmp_path_factory):
    run = submit(tmp_path_factory.mktemp("train") / "run", *LOCAL, *keys)
    assert run.status == 0, run.output
    return run


@pytest.mark.full  # by default: test_nccl_rules.py, and tests/roles/test_reward.py
def test_train_ranks_serve_it(on_train_ranks):
    lines = on_train_ranks.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert len({line["train/reward"] for line in lines}) == 3
    for line in lines:
        assert line["train/reward"] == line["train/reward_model_score"] != 0
        assert line["train/reward_model_truncated"] == 0
    assert lines[1]["val/reward"] == lines[1]["val/reward_model_score"] != 0
    rollouts = read_rollouts(on_train_ranks.folder / "rollouts/step_000001.jsonl")
    assert len({rollout["reward"] for rollout in rollouts}) == len(rollouts)


@pytest.mark.long
def test_ranks_of_its_own_serve_it_and_may_be_killed(keys, on_train_ranks, tmp_path):
    victim = FIRST_OF_REWARD + 1
    fault = Fault("score", victim, actor=victim, count=2)
    broken = submit(tmp_path / "run", *LOCAL, *keys, *APART, fault=fault)
    assert broken.status == 1, broken.output
    assert (pids_of(broken.folder) / "done").exists(), "the fault never struck"
    assert f"rank {victim} (reward) was ended by SIGKILL" in broken.output
    assert left_alive(broken.folder) == []
    rerun = submit(tmp_path / "run", *LOCAL, *keys, *APART)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == on_train_ranks.metrics()
