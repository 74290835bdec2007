"""The real package where it is installed, which is not among ours: pip install 'verifiers==0.4.*'."""

import gc
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.registry import build
from pipeline.environments.verifiers import Verifiers, tasks
from pipeline.types import Prompt

TASKSETS = Path(__file__).parent / "tasksets"
installed = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="the package verifiers is not installed")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="the package verifiers is installed")
def test_without_the_package_it_is_said():
    config = EnvironmentConfig(kind="verifiers", kwargs={"taskset": "gsm8k-v1"})
    with pytest.raises(ValueError, match=r"env\.hub \(kind verifiers\): the package verifiers is not installed .*pip install"):
        build({"hub": config})
    with pytest.raises(ValueError, match="is not installed"):
        tasks("train", 0, taskset="gsm8k-v1", size=1)


@pytest.fixture
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifiers]:
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))  # of the tools' servers
    kwargs: dict[str, Any] = {"taskset": "hetstep_sums", "config": getattr(request, "param", {})}
    (made,) = build({"hub": EnvironmentConfig(kind="verifiers", timeout_s=60.0, kwargs=kwargs)}).values()
    yield made
    made.close()
    sys.modules.pop("hetstep_sums", None)


def prompt(number: int) -> Prompt:
    (record,) = tasks("train", 0, taskset="hetstep_sums", size=1, first=number)
    assert record["messages"] == [
        {"role": "system", "content": "Only the number."},
        {"role": "user", "content": f"{number}+{number}="},
    ]
    return Prompt(0, np.zeros(1, np.int32), "hub", {"messages": record["messages"], "answer": record["answer"]})


@installed
def test_many_episodes_of_one_turn(environment: Verifiers):
    episodes = [environment.reset(prompt(number % 5)) for number in range(8)]
    outcomes = [environment.step(episode, "4") for episode in reversed(episodes)]
    assert [outcome.reward for outcome in reversed(outcomes)] == [float(number % 5 == 2) for number in range(8)]
    assert all(outcome.observation is None and outcome.metrics == {"right": outcome.reward} for outcome in outcomes)


@installed
@pytest.mark.parametrize("environment", [{"tool": True}], indirect=True)
def test_a_tool(environment: Verifiers):
    episode = environment.reset(prompt(3))
    call = '<tool_call>{"name": "adder_add", "arguments": {"a": 3, "b": 3}}</tool_call>'
    first = environment.step(episode, f"let me see {call}")
    assert (first.reward, first.observation) == (0.0, {"role": "tool", "content": "6"})
    wrong = environment.step(episode, call.replace("adder_add", "subtract"))
    assert wrong.observation == {"role": "tool", "content": "error: there is no tool 'subtract'"}
    assert environment.step(episode, "6").reward == 1.0


@installed
def test_an_episode_that_is_forgotten_is_cancelled(environment: Verifiers):
    episode = environment.reset(prompt(1))
    assert len(environment._bridge._runs) == 1
    del episode
    gc.collect()
    deadline = time.monotonic() + 30
    while environment._bridge._runs and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not environment._bridge._runs and not environment._bridge._held


@installed
def test_a_prompt_of_another_task_is_refused(environment: Verifiers):
    other = prompt(2)
    with pytest.raises(ValueError, match="the task begins otherwise than the prompt"):
        environment.reset(Prompt(0, other.tokens, "hub", {**other.task, "answer": "3"}))


@installed
def test_a_taskset_that_there_is_not():
    with pytest.raises(ValueError, match=r"env\.hub \(kind verifiers\): taskset: .*no_such_taskset"):
        build({"hub": EnvironmentConfig(kind="verifiers", kwargs={"taskset": "no_such_taskset"})})
