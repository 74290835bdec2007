"""Scenarios of an engine's rank whose environments run in a separate process. Each scenario is a program.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.environments.environment import Environment, Outcome
from pipeline.environments.python_tool import LIMITS, PythonArguments, PythonTool
from pipeline.rollout import environment_pool, environment_process
from pipeline.rollout.environment_pool import CallFailure
from pipeline.rollout.environment_process import LOST_WITH_PROCESS, EnvironmentProcess
from pipeline.rollout.environment_server import frame
from pipeline.rollout.environment_threads import EnvironmentSettings, StepRequest, load
from pipeline.sandbox import processes
from pipeline.types import Prompt, Rollout
from tests.generate.tiny import Checkpoint
from tests.rollout.engine import Bench, by_place, prompts, work
from tests.rollout.test_driver import ANY
from tests.rollout.test_environment_pool import EXPECTED, TASKS

NAUGHTY = "tests.rollout.test_environment_pool.Naughty"


def hold_lock() -> None:
    """Search for hours: `re` does not release the GIL."""
    re.fullmatch("(a+)+", "a" * 64 + "b")


class Deadly(Environment):
    """Rewards each of three turns with 1. The first turn of prompt 3 and the second turn of prompt 4 end the process."""

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
    """Starts a program in the sandbox, records the running processes, and holds the GIL."""

    def __init__(self, notes: str) -> None:
        self._notes = Path(notes)

    def step(self, prompt, text):
        session = PythonTool(PythonArguments(sandbox="none", session_s=60.0, **asdict(LIMITS))).open()
        session.execute("1", 60.0)
        pids = [os.getpid(), *processes.descendants(os.getpid())]
        (self._notes / "noting").write_text(" ".join(map(str, pids)))
        (self._notes / "noting").rename(self._notes / "pids")
        hold_lock()


def fork_early(count: int = 1) -> None:
    for _ in range(count):
        environment_process.fork_early()


def settings(folder: Path, kind: str, name: str = "told", limit_s: float = 60.0, **kwargs: Any) -> EnvironmentSettings:
    environment = EnvironmentConfig(kind=kind, timeout_s=limit_s, kwargs=kwargs, precision="float32")
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
    """Episodes in threads and in the process are equal to the bit, failing ones too.

    They run one at a time: the composition of a batch changes rounding, and depends on time.
    """
    fork_early(2)
    for chosen in (settings(folder, "tests.rollout.engine.FixedTurns", turns=3), settings(folder, NAUGHTY, "naughty", 0.3)):
        (name,) = chosen.env
        found = []
        for executor in (EnvironmentProcess, load):
            execute = functools.partial(executor, chosen)
            bench = Bench(Checkpoint(folder, None), execute, max_num_seqs=1)
            later = bench.driver.rollout(work(0, prompts(12, name), samples=2, max_turns=5))
            bench.work()
            found.append([rollout for _, rollouts in sorted(by_place(later.unsent).items()) for rollout in rollouts])
            held = bench.driver._environments
            assert not (held._held if executor is EnvironmentProcess else held._stepper._open)
        assert len(found[0]) == 24 and [bits(rollout) for rollout in found[0]] == [bits(rollout) for rollout in found[1]]
        failures = [rollout.failure or rollout.broke for rollout in found[0]]
        assert [bool(rollout.failure) for rollout in found[0]] == [
            place < 2 * TASKS and name == "naughty" for place in range(24)
        ]
        if name == "told":
            assert not any(failures) and found[0][0].reward == 2.0 and found[0][0].metrics == {"turns": 3.0}
        else:
            expected = [pattern for pattern in EXPECTED for _ in range(2)]
            assert all(map(re.fullmatch, expected, failures)) and failures[20:] == [""] * 4, failures


def bits(rollout: Rollout) -> tuple:
    completions = [(turn.completion.tokens.tobytes(), turn.completion.logprobs.tobytes()) for turn in rollout.turns]
    observations = [(turn.observation.dtype, turn.observation.tobytes(), turn.completion.finish) for turn in rollout.turns]
    return completions, observations, rollout.reward, rollout.metrics, rollout.failure, rollout.broke


def deaths(folder: Path, way: str, why: str) -> None:
    """The process ends twice: answers that it was judging are wrong, open episodes are excluded, and no others are affected."""
    environment_process.SILENCE_LIMIT_S = 0.5
    fork_early(3)
    chosen = settings(folder, f"{__name__}.Deadly", limit_s=1.0, way=way)
    bench = Bench(Checkpoint(folder, None), functools.partial(EnvironmentProcess, chosen), max_num_seqs=3)
    later = bench.driver.rollout(work(0, prompts(8), samples=1, max_turns=5, stop=ANY))  # a turn has one word
    bench.work()
    rollouts = [by_place(later.unsent)[place][0] for place in range(8)]
    assert re.fullmatch(f"the environments' process {why}", rollouts[3].broke), rollouts[3]
    assert rollouts[4].broke or rollouts[4].failure == LOST_WITH_PROCESS  # the other one was the last that it held
    for place, rollout in enumerate(rollouts):
        if rollout.failure or rollout.broke:
            assert rollout.failure == LOST_WITH_PROCESS or (place in (3, 4) and rollout.reward == 0.0), place
        else:
            assert rollout.reward == 3.0 and len(rollout.turns) == 3
    assert sum(not rollout.failure for rollout in rollouts) >= 8 - 2 * 3  # at most three episodes are open at once
    assert rollouts[7].reward == 3.0 and not bench.driver._environments._held


def unbegun(folder: Path) -> None:
    """Only the turn that ended the process fails, none that waits for the one worker; then the process's open episodes."""
    fork_early(2)
    process = started(settings(folder, f"{__name__}.Deadly", way="kill"))
    first = prompts(1, first=9)[0]
    process.submit(said("held", first, last=False))
    ((_, outcome),) = answers(process, 1)
    assert outcome.observation.tolist() == [21]
    for prompt in prompts(8):
        process.submit(said(str(prompt.index), prompt))
    found = dict(answers(process, 8))
    assert [episode for episode, answer in found.items() if isinstance(answer, CallFailure)] == ["3"] and found["3"].of_answer
    process.submit(said("held", None))
    assert answers(process, 1) == [("held", CallFailure(LOST_WITH_PROCESS))]
    assert process.seconds_left() is None and not process._held


def said(episode: str, prompt: Prompt | None, last: bool = True) -> StepRequest:
    return StepRequest(episode, "a prompt", "told", prompt, np.asarray([5], np.int32), last, 10)


def answers(process: EnvironmentProcess, count: int) -> list[tuple[str, Any]]:
    """Return the next `count` answers, within two minutes: a replacement process must load."""
    found, deadline = [], time.monotonic() + 120
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers: {found}"
        found += process.take()
        time.sleep(0.01)
    return found


def idle_deaths(folder: Path) -> None:
    """A process that always dies ends the run; one that judges between its deaths does not."""
    fork_early(2 * environment_process.MAX_IDLE_DEATHS + 1)
    process = started(settings(folder, "exact_match"))

    def kill() -> None:
        process._process.handle.kill()
        process._process.handle.wait(10)

    for death in range(2 * environment_process.MAX_IDLE_DEATHS):
        if death == environment_process.MAX_IDLE_DEATHS:
            process.submit(said("0", prompts(1)[0]))
            answers(process, 1)
        kill()
        assert process.take() == []
    kill()
    with raises(RuntimeError, "was killed by SIGKILL; it has ended 4 times in a row without judging anything"):
        process.take()


def errors(folder: Path) -> None:
    """An error in building environments is raised on the rank as if they were built there."""
    fork_early()
    with raises(ValueError, rf"env\.told: kind {__name__}\.Deadly: kwargs do not fit Deadly"):
        started(settings(folder, f"{__name__}.Deadly", no=1))


def garbled(folder: Path) -> None:
    """A command that cannot be decoded ends the process at once, and the rank raises the cause."""
    environment_process.SILENCE_LIMIT_S = 3600.0
    fork_early()
    process = started(settings(folder, "exact_match"))
    process._process._unsent.put(frame("no command"))
    with raises(RuntimeError, "ValidationError: Expected `array`, got `str`"):
        answers(process, 1)
    assert process._process.handle.wait(60) == 0


class Together(Environment):
    """Judges once `size` turns have arrived, or after a delay. Those in `deadly`, "<prompt>/<turn>", end the process."""

    workers = 6

    def __init__(self, deadly: list[str], size: int = 4) -> None:
        self._deadly, self._size, self._inside, self._changed = deadly, size, 0, threading.Condition()

    def reset(self, prompt):
        return {"index": prompt.index, "turn": 0}

    def step(self, episode, text):
        episode["turn"] += 1
        with self._changed:
            self._inside += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._inside >= self._size, 0.5)
        if f"{episode['index']}/{episode['turn']}" in self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)  # the process dies before this
        with self._changed:
            self._inside -= 1
        return Outcome(1.0, {}, {"role": "user", "content": "w21"} if episode["turn"] == 1 else None)


class Later(Environment):
    """The call of prompt 0 hangs, and ends the process when a call of prompt 1 arrives."""

    workers = 2
    begun = threading.Event()

    def step(self, prompt, text):
        if prompt.index == 0:
            self.begun.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        self.begun.set()
        time.sleep(0.2)
        return Outcome(1.0)


def verdicts(process: EnvironmentProcess, turns: list[StepRequest]) -> dict[str, str]:
    """Return the outcomes of turns submitted at once: judged, broke or excluded."""
    for one in turns:
        process.submit(one)
    found = dict(answers(process, len(turns)))
    kinds = {episode: answer.of_answer if isinstance(answer, CallFailure) else None for episode, answer in found.items()}
    return {episode: {None: "judged", True: "broke", False: "left out"}[kind] for episode, kind in kinds.items()}


def suspects(folder: Path) -> None:
    """When a process dies while it judges several answers, only those that kill it alone are wrong."""
    fork_early(4)
    process = started(settings(folder, f"{__name__}.Together", deadly=["1/1", "3/1"]))
    found = verdicts(process, [said(str(prompt.index), prompt) for prompt in prompts(4)])
    assert found == {"0": "judged", "1": "broke", "2": "judged", "3": "broke"}, found
    assert not process._calls and not process._held and not process._retrying


def accused(folder: Path, deadly: str) -> None:
    """Second turns cannot be judged again: they are wrong unless a concurrent first turn was the cause."""
    fork_early(3)
    process = started(settings(folder, f"{__name__}.Together", deadly=[deadly]))
    zero, one, two, three = prompts(4)
    assert verdicts(process, [said(str(p.index), p, last=False) for p in (zero, one, two)]) == dict.fromkeys("012", "judged")
    found = verdicts(process, [said("0", None), said("1", None), said("2", None), said("3", three)])
    seconds = "left out" if deadly == "3/1" else "broke"
    assert found == {**dict.fromkeys("012", seconds), "3": "broke" if deadly == "3/1" else "judged"}, found
    assert verdicts(process, [said("4", prompts(1, first=4)[0])]) == {"4": "judged"}


def given_up(folder: Path) -> None:
    """An abandoned call ends the process later: turns being judged then are judged again."""
    fork_early(2)
    process = started(settings(folder, f"{__name__}.Later", limit_s=1.0))
    zero, one = prompts(2)
    assert verdicts(process, [said("0", zero)]) == {"0": "broke"}
    pid = process._process.handle.pid
    assert verdicts(process, [said("1", one)]) == {"1": "judged"}
    assert process._process.handle.pid != pid


def worn_out(folder: Path) -> None:
    """Calls that hang are abandoned, and too many of them end the process; no other turn is lost."""
    environment_pool.MAX_HANGING_CALLS = 2
    fork_early(2)
    process = started(settings(folder, f"{__name__}.Hanging", limit_s=0.3))
    found = verdicts(process, [said(str(prompt.index), prompt) for prompt in prompts(10)])
    assert found == {str(index): "judged" if index % 2 else "broke" for index in range(10)}, found


class Hanging(Environment):
    workers = 4

    def step(self, prompt, text):
        if prompt.index % 2 == 0:
            threading.Event().wait()
        return Outcome(1.0)


def orderly(folder: Path) -> None:
    """A signal that tells the rank to leave does not end the process; `close` does, and closes the environments."""
    closed = folder.parent / f"closed by {os.getpid()}"
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
    """The rank is killed while its environments' process holds the GIL and a program runs in the sandbox."""
    fork_early()
    process = started(settings(folder, f"{__name__}.Holding", notes=str(notes)))
    process.submit(said("0", prompts(1)[0]))
    deadline = time.monotonic() + 120
    while not (notes / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def executed(folder: Path) -> None:
    """The process is started as a program where it cannot be a fork."""
    process = started(settings(folder, "exact_match"))
    pid = process._process.handle.pid
    assert b"pipeline.rollout.environment_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    process.submit(said("0", prompts(1)[0]))
    assert answers(process, 1)[0][1].metrics["accuracy"] == 0
    process.close()
    assert process._process.handle.poll() == 0
