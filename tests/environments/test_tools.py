"""Tool calls, with tools that hang, raise, and return a megabyte."""

import functools
import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from pipeline.config import RECIPES, EnvironmentConfig, TokenizerConfig
from pipeline.data.call_parsers import CallParser
from pipeline.data.chat import load_tokenizer
from pipeline.environments.build_environments import build
from pipeline.environments.code import OWN_SHARE
from pipeline.environments.environment import Environment, Outcome
from pipeline.environments.tool import ToolError
from pipeline.environments.tools import MAX_ABANDONED, Tools
from pipeline.types import Prompt
from tests.environments.pooled import outcomes

PROMPT = Prompt(0, np.zeros(1, np.int32), "tools", {"answer": "3995"})


@functools.cache
def hermes() -> CallParser:
    """Return the parser of plain prompts."""
    config = TokenizerConfig(name=str(RECIPES / "tiny"))
    return CallParser(load_tokenizer(config), config, chat=False)


class Troublesome:
    """A user's tool."""

    parameters = {"way": str}  # noqa: RUF012

    def __init__(self) -> None:
        self.release = threading.Event()
        self.opened = self.closed = 0

    def open(self) -> "Troublesome":
        self.opened += 1
        return self

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        match arguments["way"]:
            case "hang":
                self.release.wait()
            case "give up":
                raise TimeoutError("a second was not enough")
            case "raise":
                raise OSError("disk on fire")
            case "complain":
                raise ToolError("not so")
            case "much":
                return "x" * 1_000_000
        return "fine"

    def close(self) -> None:
        self.closed += 1


def environment(timeout_s: float = 10.0, **kwargs: Any) -> Tools:
    configs = {
        "tools": EnvironmentConfig(
            kind="tools",
            timeout_s=timeout_s,
            kwargs={"judge": "answers", "tools": {"calculator": {}, "trouble": {"kind": f"{__name__}.Troublesome"}}, **kwargs},
        ),
        "answers": EnvironmentConfig(kind="exact_match"),
    }
    return build(configs, call_parser=hermes())["tools"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(outcome: Outcome) -> list[str]:
    assert isinstance(outcome.observation, list) and outcome.reward == 0.0
    assert {message["role"] for message in outcome.observation} == {"tool"}
    return [message["content"] for message in outcome.observation]


def told(environment: Tools, text: str) -> tuple[str, dict[str, float]]:
    outcome = environment.step(environment.reset(PROMPT), text)
    (content,) = results(outcome)
    return content, outcome.metrics


def test_an_episode():
    tools = environment()
    episode = tools.reset(PROMPT)
    first = tools.step(episode, f"<think>maybe <tool_call> helps</think> {call('calculator', expression='47*85')}")
    assert first.observation == [{"role": "tool", "tool_call_id": "call00000", "name": "calculator", "content": "3995"}]
    function = {"name": "calculator", "arguments": {"expression": "47*85"}}
    assert first.turn["tool_calls"] == [{"id": "call00000", "type": "function", "function": function}]
    assert (first.reward, first.metrics) == (0.0, {"accuracy": 0.0, "calls": 1.0, "call_errors": 0.0})
    second = tools.step(episode, call("calculator", expression="1/0") + call("calculator", expression="2+2"))
    assert results(second) == ["error: division by zero", "4"]
    assert [call["id"] for call in second.turn["tool_calls"]] == ["call00001", "call00002"]
    last = tools.step(episode, " 3995 ")
    assert (last.reward, last.observation) == (1.0, None)
    assert last.metrics == {"accuracy": 1.0, "unparsed": 0.0, "calls": 3.0, "call_errors": 1.0}
    assert last.extracted == "3995"
    assert tools.step(tools.reset(PROMPT), "<think><tool_call></think>3994").metrics["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>{", "error: not JSON: .*"),
        ('<tool_call>{"name": "calculator", "arguments": {}}', "error: a <tool_call> without </tool_call>"),
        ("<tool_call>{</tool_call>", "error: not JSON: .*"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: not JSON: .*"),
        ("<tool_call>[]</tool_call>", "error: no call in the model's format can be read"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: a call without 'name'"),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>', "error: arguments are a JSON object"),
        (call("search", q="x"), "error: there is no tool 'search'; there are: calculator, trouble"),
        (call("calculator", code="x"), "error: the arguments are: expression; not: code"),
        (call("calculator"), "error: the arguments are: expression; not: none"),
        (call("calculator", expression=3), "error: argument expression is a text"),
        (call("trouble", way="complain"), "error: not so"),
        (call("trouble", way="give up"), "error: a second was not enough"),
    ],
)
def test_the_policy_is_told_its_mistakes(text: str, answer: str):
    tools = environment()
    content, metrics = told(tools, text)
    assert content.startswith(answer.removesuffix(".*")) if answer.endswith(".*") else content == answer
    assert metrics == {"accuracy": 0.0, "calls": 1.0, "call_errors": 1.0}
    assert tools.step(tools.reset(PROMPT), text).malformed == ("trouble" not in text)  # a tool's own error is none


def test_a_tool_that_hangs_is_abandoned_and_others_continue():
    tools = environment(timeout_s=0.3)
    trouble = tools._tools["trouble"]
    episode = tools.reset(PROMPT)
    start = time.monotonic()
    outcome = tools.step(episode, call("trouble", way="hang") + call("calculator", expression="1+1"))
    assert time.monotonic() - start < 30
    late = "error: the tool did not answer within 0.3 s"
    assert results(outcome) == [late, late]  # the turn's time limit was reached
    assert results(tools.step(episode, call("trouble", way="well"))) == ["fine"]
    assert trouble.opened == 2  # without the session that still hangs
    assert tools.step(episode, "3995").reward == 1.0
    assert trouble.closed == 1
    trouble.release.set()


def test_tools_that_hang_forever_end_as_an_error(monkeypatch: pytest.MonkeyPatch):
    assert MAX_ABANDONED < 1000
    monkeypatch.setattr("pipeline.environments.tools.MAX_ABANDONED", 2)
    tools = environment(timeout_s=0.05)
    for _ in range(2):
        told(tools, call("trouble", way="hang"))
    trouble = tools._tools["trouble"]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="2 tool calls have not ended; the last is a call of tool trouble"):
            told(tools, call("trouble", way="hang"))
    assert trouble.opened == 2 and len([one for one in threading.enumerate() if one.name == "tool trouble"]) == 2
    trouble.release.set()
    for thread in tools._abandoned:
        thread.join()
    assert told(tools, call("trouble", way="hang"))[0] == "fine"


def test_a_tool_that_raises_excludes_the_episode():
    with pytest.raises(OSError, match="disk on fire"):
        told(environment(), call("trouble", way="raise"))


def test_a_long_output_is_truncated_with_a_mark():
    content, _ = told(environment(limit=100), call("trouble", way="much"))
    assert content == "x" * 100 + "\n... (999900 characters cut)"
    content, _ = told(environment(limit=100), call("y" * 1000))
    assert content.startswith("error: there is no tool") and len(content) < 140


def test_endless_calls():
    tools = environment(max_calls=2)
    outcome = tools.step(tools.reset(PROMPT), call("calculator", expression="1+1") * 1000)
    assert results(outcome) == ["2", "2", "error: more than 2 calls in one turn"]
    assert outcome.metrics["calls"] == 1000 and len(outcome.turn["tool_calls"]) == 3


def test_the_short_format_of_a_small_model():
    configs = {
        "product": EnvironmentConfig(kind="calculator", kwargs={"judge": "answers", "open": "[", "close": "]", "reply": "{};"}),
        "answers": EnvironmentConfig(kind="exact_match"),
    }
    calculator = build(configs)["product"]
    episode = calculator.reset(PROMPT)
    assert calculator.step(episode, "[47*85]").observation == {"role": "tool", "content": "3995;"}
    assert calculator.step(episode, "3995").reward == 1.0
    assert calculator.step(calculator.reset(PROMPT), "[47*]").observation["content"].startswith("error: '47*' is not")
    assert calculator.step(calculator.reset(PROMPT), "47*85]").reward == 0.0  # no call, and the wrong answer


class OneAtATime(Environment):
    """A user's judge."""

    inside = worst = 0

    def step(self, prompt: Prompt, text: str) -> Outcome:
        self.inside += 1
        self.worst = max(self.worst, self.inside)
        time.sleep(0.1)
        self.inside -= 1
        return Outcome(1.0)


def judged_by(judge: EnvironmentConfig, **asking: Any) -> Tools:
    tools = EnvironmentConfig(kind="tools", kwargs={"judge": "judge", "tools": ["calculator"]}, **asking)
    return build({"tools": tools, "judge": judge}, call_parser=hermes())["tools"]


def test_waiting_for_the_judge_does_not_count_as_time():
    tools = judged_by(EnvironmentConfig(kind=f"{__name__}.OneAtATime"), timeout_s=0.3)
    metrics = {"calls": 0.0, "call_errors": 0.0}
    assert outcomes(tools, PROMPT, ["3995"] * 6) == [Outcome(1.0, metrics)] * 6
    assert tools._judge.worst == 1


@pytest.mark.parametrize(
    ("asking", "judge", "found"),
    [
        (None, EnvironmentConfig(kind="exact_match"), (16, 16)),
        (3, EnvironmentConfig(kind="exact_match"), (3, 3)),
        (None, EnvironmentConfig(kind="exact_match", workers=2), (2, 2)),
        (2, EnvironmentConfig(kind="exact_match", workers=4), (2, 4)),
        (None, EnvironmentConfig(kind=f"{__name__}.OneAtATime"), (1, 1)),
    ],
)
def test_a_judge_has_as_many_workers_as_its_environment(asking: int | None, judge: EnvironmentConfig, found: tuple[int, int]):
    tools = judged_by(judge, workers=asking)
    assert (tools.workers, tools._judge.workers) == found


def test_a_judge_with_too_few_workers_is_refused():
    with pytest.raises(ValueError, match=r"env\.tools: .*workers: got 2; expected at most 1, the workers of the judge"):
        judged_by(EnvironmentConfig(kind=f"{__name__}.OneAtATime"), workers=2)


def test_a_judge_has_no_more_time_than_its_environment():
    code = EnvironmentConfig(kind="code", timeout_s=60.0, kwargs={"sandbox": "none"})
    assert judged_by(code, timeout_s=3.0)._judge._timeout_s == OWN_SHARE * 3.0
    assert judged_by(code, timeout_s=100.0)._judge._timeout_s == OWN_SHARE * 60.0
