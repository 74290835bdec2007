"""The real `verifiers` package, where it is installed: pip install 'verifiers==0.4.*' uv.

The published tasksets are folders of its repository: pip install environments/{glossary,scratchpad,kuhn_poker}.
`tests/end_to_end/test_agents.py` compares a run of it with the same conversation in process.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.environments.environment import EpisodeFailed
from pipeline.environments.verifiers import Verifiers, tasks
from pipeline.recipe.problems import RecipeError
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.environments.scripted_policy import play

FACT = "the father of theoretical computer science and artificial intelligence"
TASKSETS = Path(__file__).parent / "tasksets"
installed = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="the package verifiers is not installed")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="the package verifiers is installed")
def test_a_missing_package_is_reported():
    with pytest.raises(ValueError, match=r"env\.x: kind verifiers: the package verifiers is not installed .*pip install"):
        made("verifiers", taskset="gsm8k-v1")
    with pytest.raises(ValueError, match="is not installed"):
        tasks("train", 0, taskset="gsm8k-v1", size=1)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an environment of sums."""
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))  # of the tools' servers

    def make(environment: dict[str, Any] | None = None, **config: Any) -> Verifiers:
        return made("verifiers", timeout_s=60.0, taskset="hetstep_sums", config=config, environment=environment or {})

    return make


def prompt(number: int) -> Prompt:
    (record,) = tasks("train", 0, taskset="hetstep_sums", size=1, first=number)
    assert record["messages"] == [
        {"role": "system", "content": "Only the number."},
        {"role": "user", "content": f"{number}+{number}="},
    ]
    return Prompt(0, np.zeros(1, np.int32), "hub", {"messages": record["messages"], "answer": record["answer"]})


@installed
def test_the_reward_is_the_tasks(sums):
    environment = sums()
    for answer, reward in (("4", 1.0), ("5", 0.0)):
        outcome, (request,) = play(environment, prompt(2), [answer])
        assert (outcome.reward, outcome.metrics) == (reward, {"right": reward})
        assert request["messages"] == prompt(2).task["messages"]
    with pytest.raises(RuntimeError, match=r"ValueError.*many"):
        play(sums(careless=True), prompt(2), ["many"])


@installed
def test_a_tool(sums):
    add = ("adder_add", {"a": 3, "b": 3})
    outcome, requests = play(sums(tool=True), prompt(3), [add, ("subtract", {}), "6"])
    assert outcome.reward == 1.0 and [tool["function"]["name"] for tool in requests[0]["tools"]] == ["adder_add"]
    first, second = (message["content"] for message in requests[-1]["messages"] if message["role"] == "tool")
    assert first == "6" and "subtract" in second
    outcome, requests = play(sums({"agent": {"max_turns": 1}}, tool=True), prompt(3), [add, "6"])
    assert outcome.reward == 0.0 and len(requests) == 1


@pytest.mark.parametrize(
    "taskset, number, answers, reward",
    [
        ("glossary", 2, [("facts_lookup", {"name": "Alan Turing"}), FACT], 1.0),
        ("glossary", 2, ["<answer>a runner</answer>"], 0.0),
        ("scratchpad", 1, [("scratchpad_roundtrip", {"word": "bravo"}), "bravo"], 1.0),
        ("kuhn_poker", 0, ["[bet]", "[fold]"], 0.0),  # a zero-sum game: the mean of both seats
    ],
)
def test_a_published_taskset(taskset, number, answers, reward):
    pytest.importorskip(taskset)
    (record,) = tasks("train", 0, taskset=taskset, size=1, first=number)
    task = {"messages": record["messages"], "answer": record["answer"]}
    outcome, requests = play(
        made("verifiers", timeout_s=60.0, taskset=taskset), Prompt(0, np.zeros(1, np.int32), "hub", task), answers
    )
    assert outcome.reward == reward and len(requests) == len(answers)
    told = [message["content"] for request in requests for message in request["messages"] if message["role"] == "tool"]
    assert told == [answers[-1] for answer in answers if isinstance(answer, tuple)]


@installed
def test_a_prompt_of_another_task_is_refused(sums):
    other = prompt(2)
    with pytest.raises(EpisodeFailed, match="first messages differ from the prompt"):
        play(sums(), Prompt(0, other.tokens, "hub", {**other.task, "answer": "3"}), ["4"])


@installed
def test_unknown_names(sums):
    with pytest.raises(RecipeError, match=r"env\.x: kind verifiers: taskset: .*no_such_taskset"):
        made("verifiers", taskset="no_such_taskset")
    with pytest.raises(RecipeError, match="no_such_agent"):
        sums({"no_such_agent": {"max_turns": 1}})
