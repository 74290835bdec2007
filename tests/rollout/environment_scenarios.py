"""An engine's rank whose environments run in a process of their own. Each scenario is a program.

Their processes are forks of the scenario's own, made before it has threads, as on a machine without GPUs.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.config.environments import LIMITS
from pipeline.environments.base import Environment, Outcome
from pipeline.environments.python_tool import PythonTool
from pipeline.rollout import environment_pool, environment_process
from pipeline.rollout.environment_pool import Failure
from pipeline.rollout.environment_process import EnvironmentProcess, fork_early
from pipeline.rollout.environment_threads import EnvironmentSettings, load
from pipeline.rollout.hearing import Said
from pipeline.sandbox import processes
from pipeline.types import Prompt, Rollout
from tests.generate.tiny import Checkpoint
from tests.rollout.engine import Bench, by_place, prompts, work
from tests.rollout.test_driver import ANY
from tests.rollout.test_environment_pool import EXPECTED

NAUGHTY = "tests.rollout.test_environment_pool.Naughty"


def hold_lock() -> None:
    """For hours: `re` does not let other threads of Python run."""
    re.fullmatch("(a+)+", "a" * 64 + "b")


class Deadly(Environment):
    """Pays 1 a turn, for three turns. The first turn of prompt 3 and the second one of prompt 4 end the process."""

    workers = 1

    def __init__(self, way: str) -> None:
        self._way = way

    def reset(self, prompt):
        return {"index": prompt.index, "turn": 0}

    def step(self, episode, text):
        episode["turn"] += 1
        if (episode["index"], episode["turn"]) in ((3, 1), (4, 2)):
            if self._way == "hold":
                hold_lock()
            os.kill(os.getpid(), signal.SIGKILL)
        more = {"role": "user", "content": "w21"} if episode["turn"] < 3 else None
        return Outcome(1.0, {"turns": episode["turn"]}, more)


class Holding(Environment):
    """Starts a program in the sandbox, notes which processes there are, and holds Python's lock."""

    def __init__(self, notes: str) -> None:
        self._notes = Path(notes)

    def step(self, prompt, text):
        session = PythonTool("none", [], **LIMITS).open()
        session.execute("1", 60.0)
        pids = [os.getpid(), *processes.below(os.getpid())]
        (self._notes / "noting").write_text(" ".join(map(str, pids)))
        (self._notes / "noting").rename(self._notes / "pids")
        hold_lock()


def settings(folder: Path, kind: str, name: str = "told", limit_s: float = 60.0, **kwargs: Any) -> EnvironmentSettings:
    environment = EnvironmentConfig(kind=kind, timeout_s=limit_s, kwargs=kwargs)
    return EnvironmentSettings({name: environment}, TokenizerConfig(name=str(folder)), False, 9, sys.path, grace_s=0.0)


def started(chosen: EnvironmentSettings) -> EnvironmentProcess:
    process = EnvironmentProcess(chosen, threading.Event())
    process.wait_until_loaded()
    return process


@contextmanager
def raises(kind: type[Exception], says: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert re.search(says, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(folder: Path) -> None:
    """In threads and in the process episodes are the same to the bit, those that fail too.

    One at a time: what the engine draws together rounds together, and what it draws together depends on time.
    """
    fork_early()
    fork_early()
    for chosen in (settings(folder, "tests.rollout.engine.Told", turns=3), settings(folder, NAUGHTY, "naughty", 0.3)):
        (name,) = chosen.env
        found = []
        for executor in (EnvironmentProcess, load):
            execute = functools.partial(executor, chosen)
            bench = Bench(Checkpoint(folder, None), execute, max_num_seqs=1)
            later = bench.driver.rollout(work(0, prompts(11, name), samples=2, max_turns=5))
            bench.work()
            found.append([rollout for _, rollouts in sorted(by_place(later.unsent).items()) for rollout in rollouts])
            held = bench.driver._environments
            assert not (held._held if executor is EnvironmentProcess else held._hearing._open)
        assert len(found[0]) == 22 and [bits(rollout) for rollout in found[0]] == [bits(rollout) for rollout in found[1]]
        failures = [rollout.failure for rollout in found[0]]
        if name == "told":
            assert not any(failures) and found[0][0].reward == 2.0 and found[0][0].metrics == {"turns": 3.0}
        else:
            expected = [pattern for pattern in EXPECTED for _ in range(2)]
            assert all(map(re.fullmatch, expected, failures)) and failures[18:] == [""] * 4, failures


def bits(rollout: Rollout) -> tuple:
    completions = [(turn.completion.tokens.tobytes(), turn.completion.logprobs.tobytes()) for turn in rollout.turns]
    observations = [(turn.observation.dtype, turn.observation.tobytes(), turn.completion.finish) for turn in rollout.turns]
    return completions, observations, rollout.reward, rollout.metrics, rollout.failure


def deaths(folder: Path, way: str, why: str) -> None:
    """The process ends twice: it costs the turns that it judged and the episodes that it held, and no others."""
    environment_process.SILENCE_S = 0.5
    for _ in range(3):
        fork_early()
    chosen = settings(folder, f"{__name__}.Deadly", limit_s=1.0, way=way)
    bench = Bench(Checkpoint(folder, None), functools.partial(EnvironmentProcess, chosen), max_num_seqs=3)
    later = bench.driver.rollout(work(0, prompts(8), samples=1, max_turns=5, stop=ANY))  # a turn has one word
    bench.work()
    rollouts = [by_place(later.unsent)[place][0] for place in range(8)]
    assert re.fullmatch(f"the environments' process {why}", rollouts[3].failure), rollouts[3].failure
    assert all(rollouts[place].failure for place in (3, 4))
    for place, rollout in enumerate(rollouts):
        if rollout.failure:
            assert re.fullmatch(f"the environments' process ({why}|that held the episode has ended)", rollout.failure), place
        else:
            assert rollout.reward == 3.0 and len(rollout.turns) == 3
    assert sum(not rollout.failure for rollout in rollouts) >= 8 - 2 * 3  # at most three episodes are open at once
    assert not rollouts[7].failure and not bench.driver._environments._held


def unbegun(folder: Path) -> None:
    """Of turns that wait for the one worker only the one fails that the process died of, and then what it held."""
    fork_early()
    fork_early()
    process = started(settings(folder, f"{__name__}.Deadly", way="kill"))
    first = prompts(1, first=9)[0]
    process.submit(said("held", first, last=False))
    ((_, heard),) = answers(process, 1)
    assert heard.observation.tolist() == [21]
    for prompt in prompts(8):
        process.submit(said(str(prompt.index), prompt))
    found = dict(answers(process, 8))
    assert [episode for episode, answer in found.items() if isinstance(answer, Failure)] == ["3"]
    process.submit(said("held", None))
    assert answers(process, 1) == [("held", Failure("the environments' process that held the episode has ended"))]
    assert process.seconds_left() is None and not process._held


def said(episode: str, prompt: Prompt | None, last: bool = True) -> Said:
    return Said(episode, "a prompt", "told", prompt, np.asarray([5], np.int32), last, 10)


def answers(process: EnvironmentProcess, count: int) -> list[tuple[str, Any]]:
    found = []
    while len(found) < count:
        found += process.take()
        time.sleep(0.01)
    return found


def idle_deaths(folder: Path) -> None:
    """A process that cannot live ends the run."""
    for _ in range(environment_process.IDLE_DEATHS + 1):
        fork_early()
    process = started(settings(folder, "exact_match"))
    for _ in range(environment_process.IDLE_DEATHS):
        process._process.handle.kill()
        process._process.handle.wait(10)
        assert process.take() == []
    process._process.handle.kill()
    process._process.handle.wait(10)
    with raises(RuntimeError, "was killed by SIGKILL; it is the 4th time in a row that it ends while it judges nothing"):
        process.take()


def errors(folder: Path) -> None:
    """What keeps environments from being built, or from going on, is raised on the rank as if they ran there."""
    environment_pool.MOST_HANGING = 2
    fork_early()
    fork_early()
    with raises(ValueError, rf"env\.told \(kind {__name__}\.Deadly\): kwargs do not fit Deadly"):
        started(settings(folder, f"{__name__}.Deadly", no=1))
    chosen = settings(folder, NAUGHTY, "naughty", 0.05)
    bench = Bench(Checkpoint(folder, None), functools.partial(EnvironmentProcess, chosen))
    bench.driver.rollout(work(0, [prompts(3, "naughty")[2]] * 4, samples=1))
    with raises(RuntimeError, r"env\.naughty: 3 calls of it hang at once, each for more than 0\.05 s"):
        bench.work()


def orderly(folder: Path, closed: Path) -> None:
    """A signal that tells the rank to leave does not end the process; `close` does, and closes the environments."""
    fork_early()
    process = started(settings(folder, f"{__name__}.Closing", path=str(closed)))
    pid = process._process.handle.pid
    assert Path(f"/proc/{pid}/comm").read_text() == "hetstep-env\n"
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n"
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    process.submit(said("0", prompts(1)[0]))
    assert answers(process, 1)[0][1].reward == 1.0
    assert process._process.handle.pid == pid
    process.close()
    assert process._process.handle.poll() == 0 and closed.read_text() == "closed"


class Closing(Environment):
    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def step(self, prompt, text):
        print("the key:", os.environ["SOME_API_KEY"])
        return Outcome(1.0)

    def close(self):
        self._path.write_text("closed")


def leave(folder: Path, notes: Path) -> None:
    """The rank is killed while its environments' process holds Python's lock, and a program runs in the sandbox."""
    fork_early()
    process = started(settings(folder, f"{__name__}.Holding", notes=str(notes)))
    process.submit(said("0", prompts(1)[0]))
    while not (notes / "pids").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def executed(folder: Path) -> None:
    """The process is a program of its own where it cannot be a fork."""
    process = started(settings(folder, "exact_match"))
    pid = process._process.handle.pid
    assert b"pipeline.rollout.environment_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    process.submit(said("0", prompts(1)[0]))
    assert answers(process, 1)[0][1].metrics == {"accuracy": 0.0}
    process.close()
    assert process._process.handle.poll() == 0
