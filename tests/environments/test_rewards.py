"""Reward functions of every form, several with weights, and what each mistake says."""

import asyncio
import functools
import sys
import time
import types

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.config.environments import RewardConfig, check_environments
from pipeline.environments.build_environments import build
from pipeline.environments.environment import AnsweredTurn, Environment, Outcome, Unjudged
from pipeline.recipe import user_code
from pipeline.recipe.problems import RecipeError
from pipeline.rollout.judges.environment_steps import failure_of
from pipeline.types import Prompt
from tests.environments.pooled import Pool, made

RECORD = {"prompt": "2+2=", "answer": "4", "level": 3, "data_source": "sums", "reward_model": {"ground_truth": "4"}}
BARE = {"text": "2+2=", "answer": "4", "record": RECORD, "location": "sums.jsonl:7"}
CHAT = {key: value for key, value in BARE.items() if key != "text"} | {"messages": [{"role": "user", "content": "2+2="}]}
seen: list = []


# ---- what a user brings ------------------------------------------------------------------------------------------------------


def ours(prompt, answer, expected):
    return float(answer == expected)


def of_trl(prompts, completions, answer, **columns):
    """Written for TRL: each argument is a list of all answers."""
    return [1.0 if text == right else 0.0 for text, right in zip(completions, answer, strict=True)]


def of_trl_chat(completions, answer, **columns):
    return [1.0 if turns[0]["content"] == right else 0.0 for turns, right in zip(completions, answer, strict=True)]


def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    right = np.bool_(solution_str == ground_truth)
    return {"score": float(right), "acc": right, "pred": solution_str, "n": 2}


def plain_of_verl(data_source, solution_str, ground_truth, extra_info=None, level=0, **kwargs):
    """The column `level` does not reach it, as in verl."""
    assert (data_source, extra_info, level, kwargs) == ("sums", {}, 0, {"tolerance": 0})
    return float(solution_str == ground_truth)


class Called:
    def __init__(self, right="4"):
        self.right = right

    def __call__(self, prompt, answer):
        return float(answer == self.right)


class CalledByTRL(Called):
    async def __call__(self, completions, **columns):
        await asyncio.sleep(0)
        return [float(text == self.right) for text in completions]


callable_object = Called()
given = functools.partial(ours, expected="4")


async def later(prompt, answer, expected):
    await asyncio.sleep(0)
    return ours(prompt, answer, expected)


async def later_of_trl(completions, answer, **columns):
    return of_trl(None, completions, answer)


async def later_of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return of_verl(data_source, solution_str, ground_truth)["score"]


def scored(kind, task, text, **kwargs):
    """Return the outcome of an answer, as a judge asks for it."""
    environment = made(kind if "." in kind else f"{__name__}.{kind}", **kwargs)
    prompt = Prompt(0, np.zeros(1, np.int32), "x", task)
    outcome = environment.step_answer(environment.reset(prompt), AnsweredTurn(text, (5, 2), step=7, max_steps=20))
    environment.close()
    return outcome


@pytest.mark.parametrize(
    ("name", "task", "kwargs"),
    [
        ("ours", BARE, {}),
        ("of_trl", BARE, {}),
        ("of_trl_chat", CHAT, {}),
        ("of_verl", CHAT, {}),
        ("plain_of_verl", BARE, {"tolerance": 0}),
        ("Called", BARE, {}),
        ("Called", BARE, {"right": "4"}),
        ("CalledByTRL", BARE, {}),
        ("callable_object", CHAT, {}),
        ("given", BARE, {}),
        ("later", BARE, {}),
        ("later_of_trl", BARE, {}),
        ("later_of_verl", BARE, {}),
    ],
)
def test_every_form_is_taken_as_it_is(name, task, kwargs):
    assert [scored(name, task, text, **kwargs).reward for text in ("4", "5")] == [1.0, 0.0]


def test_numbers_of_verls_mapping_become_metrics_and_texts_notes():
    outcome = scored("of_verl", BARE, "4")
    assert outcome == Outcome(1.0, {"accuracy": 1.0, "n": 2.0}, notes={"pred": "4"})


def test_ground_truth_is_verls_column_or_the_expected_answer():
    without = {**BARE, "record": {"data_source": "sums"}}
    assert scored("of_verl", without, "4").reward == 1.0
    assert scored("of_verl", {**BARE, "answer": "five", "record": {**RECORD, "ground_truth": "5"}}, "5").reward == 1.0


def all_of_trl(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level, **columns):
    seen.append((prompts, completions, completion_ids, trainer_state.global_step, trainer_state.max_steps, level, columns))
    log_extra("length", [len(completions[0])])
    log_metric("long", 0.25)
    return [2]


def test_trls_arguments():
    """As `GRPOTrainer._calculate_rewards` of TRL passes them, with lists of length one; `prompt` is no column of TRL's."""
    outcome = scored("all_of_trl", CHAT, "4", scale=2.0)
    turn = [{"role": "assistant", "content": "4"}]
    columns = {"answer": ["4"], "data_source": ["sums"], "reward_model": [{"ground_truth": "4"}], "expected": ["4"]}
    assert seen.pop() == ([CHAT["messages"]], [turn], [[5, 2]], 7, 20, [3], {**columns, "scale": 2.0})
    assert outcome == Outcome(2.0, {"long": 0.25}, notes={"length": "1"})


def test_a_function_in_a_file(tmp_path):
    (tmp_path / "with-hyphen.py").write_text("calls = []\ndef right(prompt, answer):\n    return 1.0\n")
    path = f"{tmp_path}/with-hyphen.py:right"
    assert scored(path, BARE, "4").reward == 1.0 and user_code.load(path) is user_code.load(path)
    with pytest.raises(RecipeError, match=r"with-hyphen\.py.* has no rigth; did you mean right\?"):
        made(f"{tmp_path}/with-hyphen.py:rigth")
    with pytest.raises(RecipeError, match=f"there is no file {tmp_path}/none.py"):
        made(f"{tmp_path}/none.py:right")


# ---- mistakes ----------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "none": (lambda prompt, answer: None, "it returned None; expected a finite number"),
    "text": (lambda prompt, answer: "1.0", "it returned '1.0'; expected a finite number"),
    "nan": (lambda prompt, answer: float("nan"), "it returned nan; expected a finite number"),
    "infinite": (lambda completions, **_: [float("inf")], "it returned inf; expected a finite number"),
    "two": (lambda completions, **_: [1.0, 2.0], "it returned a list of 2; expected a list with one entry"),
    "number": (lambda completions, **_: 1.0, "it returned 1.0; expected a list with one entry"),
    "inapplicable": (lambda completions, **_: [None], "it returned None; expected a number, since there is no other reward"),
    "no_score": (lambda data_source, solution_str, ground_truth: {"acc": 1}, "it returned a mapping without 'score': acc"),
    "raises": (lambda prompt, answer: 1 / 0, "ZeroDivisionError: division by zero at "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_function_and_the_record(name, monkeypatch):
    function, says = MISTAKES[name]
    monkeypatch.setitem(sys.modules, "mistakes", module := types.ModuleType("mistakes"))
    setattr(module, name, function)
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)) as raised:
        scored(f"mistakes.{name}", BARE, "4")
    failure = failure_of(raised.value, "step")
    assert failure.of_answer and says in failure.why
    assert "sums.jsonl:7" in failure.why and f"mistakes.{name}" in failure.why


def needs(prompt, answer, weight):
    return 1.0


def test_a_record_without_a_column_is_not_judged():
    with pytest.raises(Unjudged, match=r"no 'weight', which the function needs\. Try a default for it") as raised:
        scored("needs", BARE, "4")
    assert failure_of(raised.value, "step").why.endswith(f"({__name__}.needs; sums.jsonl:7)")


async def forever(prompt, answer):
    await asyncio.sleep(60)


def test_an_async_function_ends_after_the_timeout():
    for forms in ({"kind": f"{__name__}.forever"}, {"rewards": [RewardConfig(f"{__name__}.forever")]}):
        environment = build({"x": EnvironmentConfig(**forms, timeout_s=0.05)})["x"]
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"the reward took more than 0\.05 s") as raised:
            outcome_of(environment, "4")
        assert time.monotonic() - begun < 5 and f"{__name__}.forever; sums.jsonl:7" in failure_of(raised.value, "step").why
        environment.close()


def test_a_mistake_costs_its_answer_and_no_judge(tmp_path):
    """In real judges: the function raises for one answer, an async one too, and others are judged."""
    (tmp_path / "odd.py").write_text("async def odd(prompt, answer):\n    return {'a': 1.0}.get(answer)\n")
    pool = Pool(tmp_path, f"{tmp_path}/odd.py:odd", timeout_s=10.0, workers=2)
    first, second, third = pool.judge("4", "a", "b", "a")
    pool.judges.close()
    assert (first.reward, third.reward) == (1.0, 1.0)
    assert second.of_answer and "it returned None" in second.why and "odd.py:odd; prompt 3" in second.why


# ---- several -----------------------------------------------------------------------------------------------------------------


def sometimes(completions, level, **columns):
    return [None if text == "skip" else 0.5 for text in completions]


five = asyncio.Barrier(5)


async def half(prompt, answer):
    """Return 0.5 once five calls wait."""
    await five.wait()
    return 0.5


def several(*rewards, **keys):
    entries = [RewardConfig(reward) if isinstance(reward, str) else RewardConfig(**reward) for reward in rewards]
    return build({"x": EnvironmentConfig(rewards=entries, **keys)})["x"]


def outcome_of(environment, text, task=BARE):
    return environment.step_answer(environment.reset(Prompt(0, np.zeros(1, np.int32), "x", task)), AnsweredTurn(text))


def test_the_weighted_sum_of_functions_and_kinds():
    """`accuracy` is the first reward's that has it; other metrics have the reward's name in front."""
    environment = several(
        {"fn": f"{__name__}.of_verl", "weight": 2.0, "name": "right"},
        {"fn": "exact_match", "weight": -0.5},
        {"fn": f"{__name__}.sometimes", "weight": 3.0},
    )
    outcome = outcome_of(environment, "4")
    assert outcome.reward == 2.0 - 0.5 + 1.5 and outcome.extracted == "4" and outcome.notes == {"right/pred": "4"}
    assert {name: outcome.metrics[f"reward/{name}"] for name in ("right", "exact_match", "sometimes")} == {
        "right": 1.0,
        "exact_match": 1.0,
        "sometimes": 0.5,
    }
    assert outcome.metrics["accuracy"] == outcome.metrics["right/n"] / 2 == 1.0
    assert outcome.metrics["exact_match/unparsed"] == 0.0


def test_none_leaves_a_reward_out_of_the_sum():
    environment = several(f"{__name__}.ours", f"{__name__}.sometimes")
    outcome = outcome_of(environment, "skip")
    assert outcome == Outcome(0.0, {"reward/ours": 0.0})
    alone = several({"fn": f"{__name__}.sometimes", "name": "a"}, {"fn": f"{__name__}.sometimes", "name": "b"})
    with pytest.raises(ValueError, match="no reward applies: each returned None"):
        outcome_of(alone, "skip")


def test_async_rewards_of_an_answer_run_at_the_same_time():
    environment = several(*({"fn": f"{__name__}.half", "name": str(number)} for number in range(5)), f"{__name__}.ours")
    assert outcome_of(environment, "4").reward == 3.5
    environment.close()


class Steps(Environment):
    def step(self, episode, text): ...


@pytest.mark.parametrize(
    ("keys", "key", "code", "says"),
    [
        ({}, "env.x.kind", "missing-value", "Try a kind, or env.x.rewards"),
        ({"kind": "math", "rewards": [RewardConfig("math")]}, "env.x.rewards", "contradiction", "{fn: math}"),
        ({"kwargs": {"a": 1}, "rewards": [RewardConfig("math")]}, "env.x.kwargs", "has-no-effect", "{fn: math, kwargs:"),
        ({"rewards": [RewardConfig("tools")]}, "env.x.rewards[0].fn", "not-a-choice", "got tools; expected a kind of one turn"),
        ({"rewards": [RewardConfig("math"), RewardConfig("math")]}, "env.x.rewards[1].name", "contradiction", "math_1"),
        (
            {"rewards": [RewardConfig("exact_match", kwargs={"patern": 1})]},
            "env.x.rewards[0].kwargs.patern",
            "unknown-key",
            "pattern",
        ),
    ],
)
def test_problems_of_rewards(keys, key, code, says):
    (problem, *_) = check_environments({"x": EnvironmentConfig(**keys)})
    assert (problem.key, problem.code) == (key, code) and says in problem.message


def test_an_environment_is_no_reward():
    with pytest.raises(RecipeError, match=r"env\.x\.rewards\[0\].*got an environment; expected a reward function"):
        several(f"{__name__}.Steps")
