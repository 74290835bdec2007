"""The real `verifiers` package, where it is installed: pip install 'verifiers==0.4.*'."""

import gc
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.environments.build_environments import build
from pipeline.environments.verifiers import Verifiers, tasks
from pipeline.rollout.judges.environment_steps import EnvironmentSettings, StepRequest
from pipeline.rollout.judges.pool import JudgePool
from pipeline.types import Prompt
from tests.environments.pooled import made, write_tokenizer
from tests.environments.test_tools import hermes

TASKSETS = Path(__file__).parent / "tasksets"
installed = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="the package verifiers is not installed")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="the package verifiers is installed")
def test_a_missing_package_is_reported():
    with pytest.raises(ValueError, match=r"env\.x: kind verifiers: the package verifiers is not installed .*pip install"):
        made("verifiers", taskset="gsm8k-v1")
    with pytest.raises(ValueError, match="is not installed"):
        tasks("train", 0, taskset="gsm8k-v1", size=1)


@pytest.fixture
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifiers]:
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))  # of the tools' servers
    kwargs: dict[str, Any] = {"taskset": "hetstep_sums", "config": getattr(request, "param", {})}
    hub = EnvironmentConfig(kind="verifiers", timeout_s=60.0, kwargs=kwargs)
    (made,) = build({"hub": hub}, call_parser=hermes()).values()
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
    (told,) = first.observation
    assert (first.reward, told["role"], told["content"]) == (0.0, "tool", "6")
    assert [call["id"] for call in first.turn["tool_calls"]] == [told["tool_call_id"]]
    wrong = environment.step(episode, call.replace("adder_add", "subtract"))
    assert [message["content"] for message in wrong.observation] == ["error: there is no tool 'subtract'"]
    assert environment.step(episode, "6").reward == 1.0


@installed
def test_a_dropped_episode_is_cancelled(environment: Verifiers):
    episode = environment.reset(prompt(1))
    assert len(environment._bridge._runs) == 1
    del episode
    gc.collect()
    deadline = time.monotonic() + 30
    while environment._bridge._runs and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not environment._bridge._runs and not environment._bridge._open_answers


@installed
def test_a_prompt_of_another_task_is_refused(environment: Verifiers):
    other = prompt(2)
    with pytest.raises(ValueError, match="first messages differ from the prompt"):
        environment.reset(Prompt(0, other.tokens, "hub", {**other.task, "answer": "3"}))


@installed
def test_an_unknown_taskset():
    with pytest.raises(ValueError, match=r"env\.hub: kind verifiers: taskset: .*no_such_taskset"):
        build({"hub": EnvironmentConfig(kind="verifiers", kwargs={"taskset": "no_such_taskset"})}, call_parser=hermes())


@installed
@pytest.mark.full
def test_a_reward_that_raises_or_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that an answer blocks the event loop of its judge alone."""
    monkeypatch.syspath_prepend(TASKSETS)
    careless = EnvironmentConfig(
        kind="verifiers", timeout_s=5.0, kwargs={"taskset": "hetstep_sums", "config": {"careless": True}}, precision="float32"
    )
    write_tokenizer(tmp_path)
    process = JudgePool(
        EnvironmentSettings({"hub": careless}, TokenizerConfig(name=str(tmp_path)), False, 1, sys.path), threading.Event()
    )
    process.wait_until_loaded()
    tokenizer = load_tokenizer(TokenizerConfig(name=str(tmp_path)))
    said = ["4", "many", "-1", "5"]
    for number, text in enumerate(said):
        tokens = np.asarray(tokenizer(text).input_ids, np.int32)
        process.submit(StepRequest(str(number), text, "hub", replace(prompt(2), index=number), tokens, True, 10))
    found: dict[str, Any] = {}
    deadline = time.monotonic() + 120
    while len(found) < len(said) and time.monotonic() < deadline:
        found |= process.take()
        time.sleep(0.05)
    process.close()
    assert [found[number].reward for number in "03"] == [1.0, 0.0]
    assert found["1"].of_answer and "ValueError" in found["1"].why
    assert found["2"].of_answer and "a task blocks all other tasks" in found["2"].why
