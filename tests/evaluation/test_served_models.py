"""Which model each engine of an evaluation serves, and which recipes are refused."""

import pytest

from pipeline import config
from pipeline.config import RECIPES, engine_models, served_models, skipped_tasks
from pipeline.evaluation import engines
from pipeline.evaluation.engines import AHEAD
from tests.problems import named

CHAT, SAFETY, REWARD = (str(RECIPES / f"suites/{name}.yaml") for name in ("chat", "safety", "reward"))
PAIRS = "evaluate.tasks.pairs={kind: preference, format: reward_bench, data: {data_path: pairs.jsonl}}"
JUDGE = "evaluate.judge.model_name=judge"
ENDPOINT = ("env.e={kind: llm_judge, kwargs: {url: 'http://h/v1', model: m}}", "evaluate.judge.env_name=e")
OWN = "evaluate.reward_model.model_name=scorer"
KEY = "evaluate.reward_model.model_name"


def loaded(suite: str, *overrides: str):
    given = ("policy.model_name=model", "name=x", "run_dir=runs/x", "cluster.generate.ranks_per_node=4", *overrides)
    return config.inspect(suite, list(given))


@pytest.mark.parametrize(
    ("suite", "overrides", "served"),
    [
        (CHAT, (JUDGE,), "ppp j"),
        (CHAT, (JUDGE, "evaluate.judge.engines=3"), "p jjj"),
        (CHAT, ENDPOINT, "pppp"),
        (CHAT, (JUDGE, PAIRS), "ppp j"),
        (CHAT, (JUDGE, PAIRS, OWN), "pp r j"),
        (CHAT, (*ENDPOINT, PAIRS, OWN, "evaluate.reward_model.engines=2"), "pp rr"),
        (CHAT, (PAIRS, f"{KEY}=${{policy.model_name}}"), "rrrr"),
        (CHAT, (JUDGE, PAIRS, f"{KEY}=${{policy.model_name}}"), "rrrr"),
        (REWARD, (), "rrrr"),
        (REWARD, (JUDGE,), "rrrr"),
        (REWARD, (OWN,), "ppp r"),
    ],
)
def test_engines(suite, overrides, served):
    found = loaded(suite, *overrides)
    assert named(found.problems) == set()
    names = {"p": "policy", "j": "judge", "r": "reward_model"}
    assert engine_models(found.recipe, 4) == tuple(names[letter] for letter in served.replace(" ", ""))
    sections = {"j": "evaluate.judge", "r": "evaluate.reward_model"}
    assert set(served_models(found.recipe)) == {sections[letter] for letter in set(served) & set(sections)}


@pytest.mark.parametrize(
    ("suite", "overrides", "problem"),
    [
        (CHAT, (), ("evaluate.judge.model_name", "missing-value")),
        (SAFETY, (JUDGE, *ENDPOINT), ("evaluate.judge", "contradiction")),
        (SAFETY, ("evaluate.judge.env_name=none",), ("evaluate.judge.env_name", "not-a-choice")),
        (SAFETY, ("env.m={kind: math}", "evaluate.judge.env_name=m"), ("evaluate.judge.env_name", "not-a-choice")),
        (REWARD, (f"{KEY}=null",), (KEY, "missing-value")),
        (CHAT, (JUDGE, f"{KEY}=${{policy.model_name}}"), (KEY, "contradiction")),
        (CHAT, (JUDGE, "cluster.generate.ranks_per_node=1"), ("cluster.generate.ranks_per_node", "too-small")),
        (CHAT, (JUDGE, PAIRS, OWN, "cluster.generate.ranks_per_node=2"), ("cluster.generate.ranks_per_node", "too-small")),
        (CHAT, (JUDGE, "evaluate.judge.engines=4"), ("cluster.generate.ranks_per_node", "too-small")),
    ],
)
def test_problems(suite, overrides, problem):
    assert named(loaded(suite, *overrides).problems) == {problem}


def test_tasks_that_do_not_apply_are_skipped():
    assert set(skipped_tasks(loaded(CHAT, JUDGE, PAIRS).recipe)) == {"pairs"}
    assert set(skipped_tasks(loaded(CHAT, JUDGE, PAIRS, OWN).recipe)) == set()
    assert "pairs" not in skipped_tasks(loaded(CHAT, PAIRS, f"{KEY}=${{policy.model_name}}").recipe)
    assert {"alpaca_eval", "mt_bench"} <= set(skipped_tasks(loaded(CHAT, PAIRS, f"{KEY}=${{policy.model_name}}").recipe))


def test_the_evaluated_model_gets_as_many_questions_as_its_own_engines_decode(monkeypatch):
    """The judge's engine, of a smaller model, may decode more."""
    monkeypatch.setattr(engines, "_judge", lambda *_: None)
    recipe = loaded(CHAT, JUDGE).recipe
    found = engines.engines_of(recipe, ["p", "p", "p", "j"], [4, 4, 4, 1024], lambda: None)
    assert found._most == AHEAD * 4
    recipe = loaded(REWARD).recipe
    monkeypatch.setattr(engines, "RewardEngines", lambda *_: None)
    assert engines.engines_of(recipe, ["r", "r"], [0, 0], lambda: None)._most == 0


def test_the_judges_configuration():
    recipe = loaded(CHAT, JUDGE, "evaluate.judge.precision=float32", "policy.generation.stop_token_ids=[5]").recipe
    judge = served_models(recipe)["evaluate.judge"]
    assert judge.model_name == judge.tokenizer.name == "judge" and judge.precision == "float32"
    assert judge.generation.vllm_cfg.max_model_len == judge.max_total_sequence_length == 16384
    assert judge.generation.stop_token_ids is None
