"""Failures of agents: the message names the user's command or function, not our code, and the end of stderr is kept."""

import asyncio
import re
import reprlib
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.environments.environment import AgentAccess, Outcome
from pipeline.rollout.judges.environment_steps import AGENT, AGENT_BEGIN, CallFailure, failure_of
from pipeline.types import Prompt
from tests.environments.pooled import made

PROMPT = Prompt(0, np.zeros(1, np.int32), "told", {"messages": []})


def failure(kind: str, part: str = AGENT, **kwargs) -> CallFailure | Outcome:
    try:
        return asyncio.run(made(kind, **kwargs).play(PROMPT, AgentAccess("http://127.0.0.1:9", "key"), 0))
    except BaseException as error:
        return failure_of(error, part)


@pytest.mark.parametrize(
    ("line", "kwargs", "why"),
    [
        ("raise KeyError('nothere')", {}, "the command exited with status 1: KeyError: 'nothere'"),
        (
            "print(1)",
            {"reward": "command", "score": ["false"]},
            "the command `score` exited with status 1: it printed no error",
        ),
        ("print('high')", {}, "the last line of the command: got 'high'; expected .*"),
        ('print(\'{"reward": 1, "metrics": [2]}\')', {}, "the last line of the command: got .*; expected .*"),
        ("pass", {"reward": "file"}, "reward.txt: the command left no text there: .*"),
        ("print('y' * 999, flush=True); time.sleep(9)", {"output_bytes": 500}, "the command printed more than 500 bytes .*"),
        ("time.sleep(99)", {"episode_s": 2.0}, r"the command took more than 2 s \(episode_s\)"),
    ],
)
def test_a_command_that_fails(line, kwargs, why):
    program = f"import sys, time; print('x' * 9 + 'the end', file=sys.stderr, flush=True)\n{line}"
    failed = failure("agent", command=[sys.executable, "-c", program], **kwargs)
    assert isinstance(failed, CallFailure) and failed.of_answer and re.fullmatch(why, failed.why), failed
    assert "score" in kwargs or "the end" in failed.notes["stderr"]


async def answers(client, task, value):
    if value == "raise":
        raise KeyError("nothere")
    return value


@pytest.mark.parametrize("value", [None, "high", {"reward": "high"}, {"score": 1}, {"reward": 1, "metrics": {"a": "b"}}])
def test_a_function_that_returns_no_reward(value):
    failed = failure("python_agent", AGENT_BEGIN, function=f"{__name__}.answers", kwargs={"value": value})
    why = rf"the function returned {re.escape(reprlib.repr(value))}; expected .*, or an Outcome \(before its first request\)"
    assert isinstance(failed, CallFailure) and not failed.of_answer and re.fullmatch(why, failed.why), failed


def test_an_error_of_a_function_keeps_its_line():
    failed = failure("python_agent", function=f"{__name__}.answers", kwargs={"value": "raise"})
    assert isinstance(failed, CallFailure)
    assert re.fullmatch(rf"the agent raised KeyError: 'nothere' at {re.escape(str(Path(__file__)))}:\d+", failed.why)
