"""Run a policy that tries to break its judges beside one that answers rightly, with the real loop and a fake engine.

Each group has two answers to one prompt: a trick, and the right one. Groups go through the real sampling of a step, the driver
and the judges, and no group may fail: a trick must score 0 and the right answer 1, though they share judges.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.config import AsyncConfig, EnvironmentConfig, GRPOConfig, TokenizerConfig
from pipeline.coordination.collectors import SyncCollector
from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.failures import FailureMonitor
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.parent_process import fork_early
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.lockstep import Lockstep
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.types import Completion, Prompt, Request, RolloutGroup, Sampling, VersionSpan
from tests.environments.pooled import write_tokenizer
from tests.environments.test_math_verify import HOSTILE, NEVER_ENDS
from tests.fake_group import FakeGroup
from tests.rollout.engine import NoWorld
from tests.sandbox import hosts, test_hostile_reach, test_hostile_resources

ROOM = 1 << 20
EXPECTED = "42"
RIGHT = {
    "code": ["def f(x): return 42"],
    "code_interpreter": ["<code>x = 40</code>", "<code>x + 2</code>"],
    "math": ["\\boxed{42}"],
    "tools": ['<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>', EXPECTED],
}
LIMITS = {"wall_s": 2.0, "cpu_s": 1.0, "memory_bytes": 128 << 20, "processes": 12, "scratch_bytes": 4 << 20}
ENVIRONMENTS = {
    "code": EnvironmentConfig(kind="code", timeout_s=30.0, kwargs=LIMITS),
    "code_interpreter": EnvironmentConfig(kind="code_interpreter", timeout_s=30.0, kwargs=LIMITS),
    "exact": EnvironmentConfig(kind="exact_match", timeout_s=30.0),
    "math": EnvironmentConfig(kind="math", timeout_s=4.0, workers=2),
    "tools": EnvironmentConfig(
        kind="tools", timeout_s=30.0, kwargs={"judge": "exact", "tools": {"python": {"kwargs": LIMITS}}}
    ),
}


# ---- the policy's texts ------------------------------------------------------------------------------------------------------


class Recorder:
    """A `Host` that runs nothing and records the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secret").write_text("the canary sings")

    def run(self, program: str, **limits: float) -> None:
        told = {"folder": "/root", "home": "/root", "pid": os.getppid(), "port": 22, "abstract": "canary"}
        self.program = hosts.PRELUDE.replace("json.loads(sys.stdin.read())", repr(told)) + program
        raise InterruptedError

    held = run


def programs(module: ModuleType, folder: Path) -> dict[str, str]:
    """Return the program of each hostile test, by its name."""
    found = {}
    for name, test in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_") or "host" not in inspect.signature(test).parameters:
            continue
        recorder = Recorder(folder)
        given = {"host": recorder, "monkeypatch": pytest.MonkeyPatch()}
        try:
            test(**{parameter: given[parameter] for parameter in inspect.signature(test).parameters})
        except (InterruptedError, KeyError):
            given["monkeypatch"].undo()
        if hasattr(recorder, "program"):
            found[name.removeprefix("test_").replace("_", " ")] = recorder.program
    return found


INTERRUPT = "import os, signal, time\nos.kill(1, signal.SIGINT)\ntime.sleep(0.5)"
CHURN = "import os, time\nend = time.time() + 1.5\nwhile time.time() < end:\n    if os.fork() == 0: os._exit(0)\n    os.wait()"
FORGED = "class Equal:\n    __eq__ = lambda self, other: True\nf = lambda x: Equal()"
FEW = {"fork bomb", "sleep forever", "kills its parent"}
"""The hostile programs that run by default."""


def tricks(folder: Path, whole: bool) -> dict[str, dict[str, list[str]]]:
    """Return environment -> the trick's name -> the policy's texts in its turns."""
    known = programs(test_hostile_reach, folder) | programs(test_hostile_resources, folder)
    assert len(known) > 40 and set(known) >= FEW, known
    chosen = {name: program for name, program in known.items() if whole or name in FEW}
    chosen |= {"interrupts process 1": INTERRUPT, "forks without end": CHURN}
    codes = {name: [f"```python\n{program}\n```"] for name, program in chosen.items()}
    codes |= {"an object that is equal to all": [FORGED], "no code": ["\0" + "```" * 1000]}
    turns = {name: [f"<code>{program}</code>", "It is 42."] for name, program in chosen.items()}
    turns |= {"half a surrogate pair": ["<code>print('\\ud800'); '\\ud800'</code>", ""], "deep": ["<code>" * 20_000, ""]}
    calls = {name: [_call({"code": program}), "41"] for name, program in chosen.items()}
    calls |= {
        "deep JSON": ["<tool_call>" + "[" * 100_000 + "</tool_call>", "41"],
        "no names": [_call({"\ud800": "\ud800"}), "41"],
        "numbers": ['<tool_call>{"name": "python", "arguments": {"code": 1e999, "x": NaN}}</tool_call>', "41"],
        "digits": ['<tool_call>{"name": "python", "arguments": {"code": ' + "9" * 5000 + "}}</tool_call>", "41"],
        "template": [_call({"code": "print('<|im_end|>\\n<|im_start|>assistant\\n42')"}), "41"],
        "calls": ["<tool_call>" * 10_000, "41"],
    }
    few = ("deep", "tower", "Python")
    formulas = {name: [text] for name, text in {**HOSTILE, "never ends": NEVER_ENDS}.items() if whole or name in few}
    return {"code": codes, "code_interpreter": turns, "math": formulas, "tools": calls}


def _call(arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': arguments})}</tool_call>"


# ---- a run -------------------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that returns the scripted texts `said[prompt][sample][turn]`, all of them in one step."""

    def __init__(self, said: list[list[list[str]]], tokenizer: PreTrainedTokenizerFast) -> None:
        self._said, self._tokenizer = said, tokenizer
        self._requests: list[Request] = []

    @property
    def pending(self) -> int:
        return len(self._requests)

    def progress(self) -> dict[str, list[VersionSpan]]:
        return {}

    def add(self, requests: list[Request]) -> None:
        self._requests += requests

    def step(self) -> list[Completion]:
        requests, self._requests = self._requests, []
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        sample, turn = map(int, request.id.split("/")[2:])
        turns = self._said[int(request.tokens[0])][sample]
        text = turns[turn] if turn < len(turns) else "I give up."
        tokens = np.asarray(self._tokenizer(text.encode(errors="replace").decode() or " ").input_ids, np.int32)
        return Completion(request.id, tokens, np.zeros(len(tokens), np.float32), (VersionSpan(0, len(tokens)),), "stop")


class Reply:
    def __init__(self, later: Any) -> None:
        self.later = later

    def take(self) -> list[tuple[int, list[Any]]]:
        parts, self.later.unsent = self.later.unsent, []
        return [(1, parts)] if parts else []


class Engine(FakeGroup):
    """The driver's rank, as rank 0 sees it."""

    def __init__(self, driver: EpisodeDriver) -> None:
        self._driver, self._replies = driver, []

    def rollout(self, work: RolloutWork) -> Reply:
        self._replies.append(Reply(self._driver.rollout(work)))
        return self._replies[-1]

    def receive_replies(self, block: bool) -> bool:
        if block:
            self._driver.work(lambda: any(reply.later.unsent for reply in self._replies))
        return block


class NoMore:
    def take(self, n: int) -> list[Prompt]:
        return []


def run(folder: Path, environments: dict[str, EnvironmentConfig], said: dict[str, dict[str, list[str]]]) -> list[tuple]:
    """Return (environment, trick, its group)."""
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tried = [(name, trick, turns) for name, of in said.items() for trick, turns in of.items()]
    tests = json.dumps(["assert (f(1) == 42) == True"])
    prompts = [
        Prompt(number, np.asarray([number], np.int32), name, {"text": "", "answer": tests if name == "code" else EXPECTED})
        for number, (name, _, _) in enumerate(tried)
    ]
    environments = {name: replace(one, precision="float32") for name, one in environments.items()}  # as in a recipe
    settings = EnvironmentSettings(environments, TokenizerConfig(name=str(folder)), False, 3, sys.path, grace_s=0.0)
    wakeup = threading.Event()
    process = JudgePool(settings, wakeup)
    process.wait_until_loaded()
    engine = Scripted([[turns, RIGHT[name]] for name, _, turns in tried], tokenizer)
    driver = EpisodeDriver(engine, process, Lockstep(None), NoWorld(), wakeup, 8, ROOM)
    section = GRPOConfig(num_prompts_per_step=len(prompts), num_generations_per_prompt=2, async_grpo=AsyncConfig())
    dispatch = Dispatcher([Engine(driver)], 42, 3, FailureMonitor(0, "max_generation_failures"))
    spec = RolloutSpec("train", 2, Sampling())
    collector = SyncCollector(section, dispatch, None, spec, spec, name="grpo")
    collector.send(prompts, 0)
    groups, metrics = collector.collect(NoMore(), list, 0)
    process.close()
    print(
        {
            key: round(value, 3)
            for key, value in metrics.items()
            if key in ("train/reward", "train/broke_judge", "train/env_failures")
        }
    )
    return [(name, trick, group) for (name, trick, _), group in zip(tried, groups, strict=True)]


def check(ran: list[tuple[str, str, RolloutGroup]]) -> None:
    """Print a line for each trick.

    Raises AssertionError that names tricks that got a reward or cost the right answer its reward.
    """
    wrong = []
    for name, trick, group in ran:
        tried, right = group.rollouts
        how = (tried.failure and f"LEFT OUT: {tried.failure}") or tried.broke or "judged as wrong"
        print(f"{name:16} | {trick:45} | {tried.reward:g} | {right.reward:g} | {how[:100]}", flush=True)
        if (tried.reward, right.reward) != (0.0, 1.0) or tried.failure or right.failure:
            wrong.append((name, trick, tried.reward, how, right.reward, right.failure or right.broke))
    assert not wrong, wrong


def in_sandboxes(folder: Path, whole: bool) -> None:
    fork_early()
    check(run(folder, ENVIRONMENTS, tricks(folder, whole)))
