"""Environments that hang, raise, or return nonsense: the answers that cause it are wrong, and no others."""

import re
import sys
import threading

import pytest

from pipeline.environments.environment import Environment, Outcome, Unjudged
from pipeline.environments.tool import ToolError
from pipeline.files.encoding import decode, encode
from pipeline.rollout import environment_pool
from pipeline.sandbox.limits import SandboxError
from pipeline.types import Rollout
from tests.rollout.engine import Bench, prompts

NEVER = threading.Event()


class Naughty(Environment):
    def reset(self, prompt):
        if prompt.index == 0:
            raise OSError("no board\nfor you")
        if prompt.index == 1:
            NEVER.wait()
        return prompt

    def step(self, prompt, text):
        match prompt.index:
            case 2:
                NEVER.wait()
            case 3:
                return {}["answer"]
            case 4:
                sys.exit(0)
            case 5:
                return 1.0
            case 6:
                return Outcome(float("nan"))
            case 7:
                return Outcome(1.0, {"accuracy": "high"})
            case 8:
                raise ValueError("no text: \ud800")
            case 9:
                return Outcome(1e308)
        return Outcome(1.0)


EXPECTED = [
    r"reset raised OSError: no board for you at .*test_environment_pool\.py:\d+",
    r"reset took more than 0\.3 s \(env\.naughty\.timeout_s\)",
    r"step took more than 0\.3 s \(env\.naughty\.timeout_s\)",
    r"step raised KeyError: 'answer' at .*test_environment_pool\.py:\d+",
    r"step raised SystemExit: 0 at .*test_environment_pool\.py:\d+",
    r"its answer raised TypeError: step returned a float, not an Outcome at .*",
    r"its answer raised ValueError: step returned the reward nan; expected .* at .*",
    r"its answer raised ValueError: could not convert string to float: 'high' at .*",
    r"step raised ValueError: no text: \\ud800 at .*",
    r"its answer raised ValueError: step returned the reward 1e\+308; expected a number from -1e\+15 to 1e\+15 at .*",
]


TASKS = 2
"""Number of errors in EXPECTED that `reset` raises, before any answer."""


def test_an_answers_failure_is_wrong_and_its_tasks_failure_is_excluded(checkpoint, caplog):
    """One thread serves all of them: one that hangs is replaced."""
    bench = Bench(checkpoint, {"naughty": Naughty()}, limit_s=0.3)
    _, rollouts = bench.run(0, prompts(12, "naughty"), samples=1)
    assert [(rollout.failure, rollout.broke) for rollout in rollouts[10:]] == [("", "")] * 2
    assert [rollout.reward for rollout in rollouts] == [0.0] * 10 + [1.0] * 2
    for place, (rollout, expected) in enumerate(zip(rollouts, EXPECTED, strict=False)):
        told, untold = (rollout.failure, rollout.broke) if place < TASKS else (rollout.broke, rollout.failure)
        assert re.fullmatch(expected, told) and not untold, rollout
        assert len(rollout.turns) == 1 and rollout.drawn_tokens > 0
    assert decode(encode(rollouts), list[Rollout])  # they can be sent
    lines = [line for line in caplog.messages if line.startswith("env.naughty: ")]
    assert len(lines) == environment_pool.LOGGED_AT_ONCE
    assert any("train prompt 0, sample 0, turn 0 failed: reset raised OSError" in line for line in lines)
    wrong = "train prompt 3, sample 0, turn 0 broke its environment and counts as wrong: step raised"
    assert any(wrong in line for line in lines)


def test_failures_that_are_not_the_answers_fault_are_excluded(checkpoint):
    """Although `step` raises it, and any other error there is the answer's fault."""

    class Unlucky(Environment):
        def step(self, prompt, text):
            raise [Unjudged("no connection"), SandboxError("sandbox: its guard said nothing"), ToolError("odd")][prompt.index]

    _, rollouts = Bench(checkpoint, {"unlucky": Unlucky()}).run(0, prompts(3, "unlucky"), samples=1)
    assert [bool(rollout.failure) for rollout in rollouts] == [True, True, False] and rollouts[2].broke
    assert "no connection" in rollouts[0].failure and rollouts[2].reward == 0.0


def test_an_episode_that_breaks_its_judge_late_loses_its_rewards(checkpoint):
    class Late(Environment):
        def step(self, prompt, text):
            told.append(text)
            return Outcome(1.0, {"accuracy": 1.0}, {"role": "user", "content": "w21"}) if len(told) < 3 else 1 / 0

    told = []
    _, (rollout,) = Bench(checkpoint, {"breaking": Late()}).run(0, prompts(1, "breaking"), samples=1, max_turns=5)
    assert (len(rollout.turns), rollout.reward, rollout.metrics) == (3, 0.0, {}) and "ZeroDivisionError" in rollout.broke


def test_breaking_a_judge_gets_no_more_than_a_wrong_answer(checkpoint):
    class Strict(Environment):
        def step(self, prompt, text):
            return {0: lambda: Outcome(-1.0), 1: lambda: 1 / 0}[prompt.index]()

    bench = Bench(checkpoint, {"strict": Strict()}, broken_rewards={"strict": -1.0})
    _, (wrong, broke) = bench.run(0, prompts(2, "strict"), samples=1)
    assert wrong.reward == broke.reward == -1.0 and broke.broke and not wrong.broke


def test_calls_that_all_hang_end_the_run_that_owns_the_threads(checkpoint, monkeypatch):
    monkeypatch.setattr(environment_pool, "MAX_HANGING_CALLS", 2)
    bench = Bench(checkpoint, {"naughty": Naughty()}, limit_s=0.05)
    with pytest.raises(RuntimeError, match=r"env\.naughty: 3 calls hang at the same time, each for more than 0\.05 s"):
        bench.run(0, [prompts(3, "naughty")[2]] * 4, samples=1)


def come(pool: environment_pool.EnvironmentPool, wakeup: threading.Event, count: int) -> list[tuple]:
    """Wait for that many answers."""
    answers = []
    while len(answers) < count:
        wakeup.wait(pool.seconds_left())
        wakeup.clear()
        answers += pool.take()
    return answers


def test_a_call_that_ends_after_it_was_abandoned_changes_nothing():
    wakeup, go = threading.Event(), threading.Event()
    pool = environment_pool.EnvironmentPool({"late": Naughty()}, {"late": 0.05}, wakeup, grace_s=0.0)

    def late(begin):
        begin("step")
        go.wait(60)
        return "late"

    pool.submit("late", "first", late)
    assert [key for key, _ in come(pool, wakeup, 1)] == ["first"]
    pool.submit("late", "second", lambda begin: "at once")
    go.set()
    assert come(pool, wakeup, 1) == [("second", "at once")]
    for thread in threading.enumerate():
        if thread.name == "environment late":
            thread.join(0.2)  # the abandoned thread ends; its successor waits for more
    assert [thread.name for thread in threading.enumerate()].count("environment late") == 1
    assert pool.take() == []
    assert pool.seconds_left() is None


def test_as_many_calls_run_concurrently_as_there_are_workers():
    wakeup, both, running = threading.Event(), threading.Barrier(2), []

    class Two(Naughty):
        workers = 2

    pool = environment_pool.EnvironmentPool({"two": Two()}, {"two": 60.0}, wakeup)

    def meet(begin):
        running.append(1)
        begin("step")
        both.wait(60)  # raises unless two calls are here
        return len(running)

    for key in range(4):
        pool.submit("two", key, meet)
    answers = come(pool, wakeup, 4)
    assert sorted(key for key, _ in answers) == [0, 1, 2, 3]
    assert not any(isinstance(result, environment_pool.CallFailure) for _, result in answers)
    assert len([thread for thread in threading.enumerate() if thread.name == "environment two"]) == 2


def test_environments_are_closed_without_waiting_for_one_that_hangs(caplog, monkeypatch):
    closed = []

    class Closing(Naughty):
        def __init__(self, way):
            self.way = way

        def close(self):
            if self.way == "raise":
                raise OSError("still in use")
            if self.way == "hang":
                NEVER.wait()
            closed.append(self.way)

    environments = {way: Closing(way) for way in ("raise", "fine", "hang", "after")}
    monkeypatch.setattr(environment_pool, "CLOSE_S", 0.2)
    environment_pool.EnvironmentPool(environments, dict.fromkeys(environments, 1.0), threading.Event()).close()
    assert closed == ["fine"]
    assert "env.raise: close raised OSError: still in use" in caplog.text
