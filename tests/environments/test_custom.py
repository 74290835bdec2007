"""Users' own environments: plain functions as rewards, and errors for classes and functions that do not fit."""

import sys
import types

import numpy as np
import pytest

from pipeline.data.records import plain_columns
from pipeline.data.stream import encode_prompt
from pipeline.environments import custom
from pipeline.environments.environment import Environment, Outcome, Unjudged
from pipeline.types import Prompt
from tests.environments.pooled import made

BARE = {"text": "2+2=", "answer": "4", "record": {"input": "2+2=", "answer": "4", "level": 3}}


def all_of_it(prompt, answer, **fields):
    seen.append((prompt, answer, fields))
    return True


def some_of_it(question, said, expected, *, level=0, scale=1.0):
    return scale * level * (said == expected)


def short(answer):
    return 0.0


seen: list[tuple] = []


class Scaled(Environment):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(self.scale)


def prompt(task):
    return Prompt(0, np.zeros(1, np.int32), "mine", task)


def built(function, **kwargs):
    return made(f"{__name__}.{function.__name__}", **kwargs)


def of_other_names(question, response, **fields):
    seen.append((question, response, fields))
    return 1.0


def as_in_trl(prompt, completion, answer):
    return float(completion == answer)


def test_a_column_may_have_a_parameters_name():
    """It is omitted if it has the name of one of the first two parameters, else passed."""
    record = {"question": "2+2=", "prompt": "of the record", "answer": "4"}
    task = {"text": "rendered", "answer": "4", "record": record}
    assert built(of_other_names).step(prompt(task), "5").reward == 1.0
    assert seen.pop() == ("rendered", "5", {"prompt": "of the record", "answer": "4", "expected": "4"})
    assert built(as_in_trl).step(prompt(task), "4").reward == 1.0


def test_a_function_gets_the_prompt_the_answer_and_the_records_columns():
    seen.clear()
    assert built(all_of_it, scale=2.0).step(prompt(BARE), "5").reward == 1.0
    assert seen == [("2+2=", "5", {"input": "2+2=", "level": 3, "expected": "4", "scale": 2.0})]


def test_a_function_without_kwargs_gets_only_its_named_columns():
    environment = built(some_of_it, scale=0.5)
    assert [environment.step(prompt(BARE), said).reward for said in ("4", "5")] == [1.5, 0.0]


def test_the_prompt_of_a_conversation_is_the_last_user_message():
    said = [("system", "be brief"), ("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    seen.clear()
    built(all_of_it).step(prompt({"messages": [{"role": role, "content": content} for role, content in said]}), "4")
    assert seen == [("2+2?", "4", {})]


@pytest.mark.parametrize("reward", ["1.0", None, [1.0], float("nan"), float("inf")])
def test_a_reward_must_be_a_finite_number(reward, monkeypatch):
    monkeypatch.setitem(sys.modules, "odd_rewards", module := types.ModuleType("odd_rewards"))
    module.odd = lambda prompt, answer, **fields: reward
    with pytest.raises(TypeError, match="expected a finite number"):
        made("odd_rewards.odd").step(prompt(BARE), "4")


@pytest.mark.parametrize(
    ("thing", "kwargs", "says"),
    [
        (short, [], "got parameters (answer); expected (prompt, answer, **fields)"),
        (some_of_it, ["scal"], "got scal in kwargs; expected parameters of the function: expected, level, scale"),
        (all_of_it, ["answer"], "got answer in kwargs; expected no name of the function's first two parameters"),
        (Scaled, [], "kwargs do not fit Scaled(scale: float) -> None: missing a required argument: 'scale'"),
        (Scaled, ["scale", "bias"], "got an unexpected keyword argument 'bias'"),
        (3, [], "got a int; expected a class or a function: (prompt, answer, **fields)"),
        (dict, [], "the class has no reset and no step and no close"),
    ],
)
def test_errors_are_reported_before_any_call(thing, kwargs, says):
    assert says in custom.problem(thing, kwargs)


def test_columns_that_cannot_be_sent_are_omitted():
    class Encoder:
        dataset = types.SimpleNamespace(output_key="output", env_name="mine")

        def question(self, record):
            return record["input"]

        def prompt(self, record):
            return np.zeros(1, np.int32)

        def answer(self, record):
            raise ValueError("no column 'output'")

    record = {"input": "x", "n": np.int64(3), "list": [1, {"a": None}], "image": object(), "deep": {"b": b"bytes"}}
    task = encode_prompt(Encoder(), 0, record, answered=False, whole=True).task
    assert task == {"text": "x", "record": {"input": "x", "n": 3, "list": [1, {"a": None}]}}
    assert "record" not in encode_prompt(Encoder(), 0, record, answered=False).task
    assert plain_columns({"a": np.arange(3)}) == {"a": [0, 1, 2]}


def test_a_record_without_a_required_field_is_not_judged():
    environment = built(as_in_trl)
    with pytest.raises(Unjudged, match=r"no 'answer', which the function needs\. Try a default for it"):
        environment.step(prompt({"text": "2+2=", "record": {"input": "2+2="}}), "4")
    assert built(as_in_trl, answer="4").step(prompt({"text": "2+2=", "record": {}}), "4").reward == 1.0
