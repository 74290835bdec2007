"""Scenarios of an engine's rank with a pool of judges. Each scenario is a program.

The pool's process is a fork of the scenario's own, made before it has threads, as on a machine without GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import EnvironmentConfig, TokenizerConfig
from pipeline.environments.environment import Environment, JudgeLimits, Outcome, ProcessStuck
from pipeline.environments.python_tool import LIMITS, PythonArguments, PythonTool
from pipeline.rollout.judges import group, parent, pool
from pipeline.rollout.judges.environment_steps import CallFailure, EnvironmentSettings, StepRequest
from pipeline.rollout.judges.group import LOST_WITH_JUDGE
from pipeline.rollout.judges.parent_process import ParentProcess, fork_early
from pipeline.rollout.judges.pool import LOST_WITH_PROCESS, JudgePool
from pipeline.rollout.judges.pools import JudgePools
from pipeline.sandbox import processes
from pipeline.types import Prompt, Rollout
from tests.generate.tiny import Checkpoint
from tests.rollout import judged
from tests.rollout.engine import Bench, FixedTurns, by_place, prompts, work

NEVER = threading.Event()


class Naughty(Environment):
    """Fails in one way for each of the first prompts, and has one judge for all of them."""

    def reset(self, prompt):
        if prompt.index == 0:
            raise OSError("no board\nfor you")
        if prompt.index == 1:
            NEVER.wait()
        return prompt

    def step(self, prompt, text):
        ways: dict[int, Callable[[], Any]] = {
            2: NEVER.wait,
            3: lambda: {}["answer"],
            4: lambda: sys.exit(0),
            5: lambda: 1.0,
            6: lambda: Outcome(float("nan")),
            7: lambda: Outcome(1.0, {"accuracy": "high"}),
            8: lambda: int("\ud800"),
            9: lambda: Outcome(1e308),
            10: lambda: os._exit(3),
            11: lambda: os.kill(os.getpid(), signal.SIGKILL),
            12: lambda: ctypes.string_at(0),
            13: hold_lock,
            14: lambda: Outcome(1.0, {"m" * (1 << 25): 1.0}),
            15: leave_a_child,
        }
        return ways.get(prompt.index, lambda: Outcome(1.0))()


class Endless(Naughty):
    """Has a judge for each of the prompts ENDLESS."""

    workers = 3


EXPECTED = [
    r"reset raised OSError: no board for you at .*judge_scenarios\.py:\d+",
    r"reset took more than 5 s \(env\.naughty\.timeout_s\)",
    r"step took more than 5 s \(env\.naughty\.timeout_s\)",
    r"step raised KeyError: 'answer' at .*judge_scenarios\.py:\d+",
    r"step raised SystemExit: 0 at .*judge_scenarios\.py:\d+",
    "step returned a float; expected an Outcome",
    r"the outcome has the reward nan; expected a number from -1e\+15 to 1e\+15",
    r"its answer raised ValueError: could not convert string to float: 'high' at .*",
    r"step raised ValueError: invalid literal for int\(\) with base 10: '\\ud800' at .*",
    r"the outcome has the reward 1e\+308; expected a number from -1e\+15 to 1e\+15",
    "its judge ended with status 3",
    "its judge was killed by SIGKILL",
    "its judge was killed by SIGSEGV",
    r"step took more than 5 s \(env\.naughty\.timeout_s\)",
    r"its judge gave an answer that cannot be read \(ValueError: got \d+ bytes; expected .*\)",
    "its judge ended with status 4",
    "",
    "",
]
TASKS = 2
"""Number of errors in EXPECTED that `reset` raises, before any answer."""
ENDLESS = (1, 2, 13)
"""Prompts whose calls exceed any time limit."""


def hold_lock() -> None:
    """Search for hours: `re` does not release the GIL."""
    re.fullmatch("(a+)+", "a" * 64 + "b")


def leave_a_child() -> None:
    """End, and leave a process that holds all descriptors."""
    if os.fork() == 0:
        os.setsid()
        NEVER.wait(600)
    os._exit(4)


class Threaded(judged.Sums):
    """Starts a thread as it is built, without which it cannot judge."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=NEVER.wait, daemon=True)
        self._thread.start()

    def step(self, episode, text):
        assert self._thread.is_alive()
        return super().step(episode, text)


class Stained(Environment):
    """An answer to prompt 0 makes its process useless for later ones; so do failures, of which a judge keeps none."""

    limits = JudgeLimits(memory_bytes=1 << 30, suspect_s=30.0)
    stained = False

    def step(self, prompt, text):
        if self.stained:
            os._exit(7)
        if prompt.index == 1:
            raise ProcessStuck("threads that hang")
        if prompt.index == 2:
            return Outcome(len(bytearray(2 << 30)))
        self.stained = prompt.index == 0
        return Outcome(1.0)

    def broken(self, how):
        return Outcome(0.25, {how: 1.0})


class Holding(Environment):
    """Starts a program in the sandbox, records the running processes, and holds the GIL."""

    def __init__(self, notes: str) -> None:
        self._notes = Path(notes)

    def step(self, prompt, text):
        session = PythonTool(PythonArguments(sandbox="none", session_s=60.0, **asdict(LIMITS))).open()
        session.execute("1", 60.0)
        pids = [os.getppid(), os.getpid(), *processes.descendants(os.getpid())]
        (self._notes / "noting").write_text(" ".join(map(str, pids)))
        (self._notes / "noting").rename(self._notes / "pids")
        hold_lock()


# ---- scenarios ---------------------------------------------------------------------------------------------------------------


def settings(folder: Path, kind: str, name: str = "told", limit_s: float = 60.0, **kwargs: Any) -> EnvironmentSettings:
    environment = EnvironmentConfig(kind=kind, timeout_s=limit_s, kwargs=kwargs, precision="float32")
    return EnvironmentSettings({name: environment}, TokenizerConfig(name=str(folder)), False, 9, sys.path, grace_s=0.0)


def started(chosen: EnvironmentSettings) -> JudgePool:
    judges = JudgePool(chosen, threading.Event())
    judges.wait_until_loaded()
    return judges


def said(episode: str, prompt: Prompt | None, last: bool = True) -> StepRequest:
    return StepRequest(episode, "a prompt", "told", prompt, np.asarray([5], np.int32), last, 10)


def answers(judges: JudgePool | JudgePools, *turns: StepRequest) -> dict[str, Any]:
    """Return the answers to turns that are submitted at once, within two minutes: a replacement process must load."""
    for turn in turns:
        judges.submit(turn)
    found, deadline = {}, time.monotonic() + 120
    while len(found) < len(turns):
        assert time.monotonic() < deadline, f"{len(found)} of {len(turns)} answers: {found}"
        found |= judges.take()
        time.sleep(0.01)
    return found


def process_of(judges: JudgePool) -> ParentProcess:
    return judges._process


def kill(judges: JudgePool) -> None:
    os.kill(process_of(judges).pid, signal.SIGKILL)


def status(judges: JudgePool) -> int:
    """Wait for the end of the process of judges; return its exit status."""
    process, deadline = process_of(judges), time.monotonic() + 60
    while not process.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.status


def pids_of(judges: JudgePool) -> list[int]:
    return processes.children(process_of(judges).pid)


@contextmanager
def raises(kind: type[Exception], says: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert re.search(says, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def same(folder: Path) -> None:
    """Episodes in judges are those of environments in this process, to the bit."""
    fork_early()
    found = []
    for execute in (
        functools.partial(JudgePool, settings(folder, "tests.rollout.engine.FixedTurns", turns=3)),
        {"told": FixedTurns(3)},
    ):
        bench = Bench(Checkpoint(folder, None), execute, max_num_seqs=1)
        later = bench.driver.rollout(work(0, prompts(12), samples=2, max_turns=5))
        bench.work()
        found.append([rollout for _, rollouts in sorted(by_place(later.unsent).items()) for rollout in rollouts])
    assert len(found[0]) == 24 and [bits(rollout) for rollout in found[0]] == [bits(rollout) for rollout in found[1]]
    assert not any(rollout.failure or rollout.broke for rollout in found[0])
    assert found[0][0].reward == 2.0 and found[0][0].metrics == {"turns": 3.0}


def bits(rollout: Rollout) -> tuple:
    completions = [(turn.completion.tokens.tobytes(), turn.completion.logprobs.tobytes()) for turn in rollout.turns]
    observations = [(turn.observation.dtype, turn.observation.tobytes(), turn.completion.finish) for turn in rollout.turns]
    return completions, observations, rollout.reward, rollout.metrics, rollout.failure, rollout.broke


def naughty(folder: Path) -> None:
    """Every way to break a judge costs one episode: its answer is wrong, or it is left out if `reset` was the cause."""
    endless = [prompts(1, "naughty", first=number)[0] for number in ENDLESS]
    others = [prompt for prompt in prompts(len(EXPECTED), "naughty") if prompt.index not in ENDLESS]
    for kind, limit_s, chosen in ((Endless, 5.0, endless), (Naughty, 60.0, others)):
        fork_early()
        environment = settings(folder, f"{__name__}.{kind.__name__}", "naughty", limit_s)
        bench = Bench(Checkpoint(folder, None), functools.partial(JudgePool, environment))
        later = bench.driver.rollout(work(0, chosen, samples=1))
        bench.work()
        rollouts = [rollouts[0] for _, rollouts in sorted(by_place(later.unsent).items())]
        for prompt, rollout in zip(chosen, rollouts, strict=True):
            expected, is_task = EXPECTED[prompt.index], prompt.index < TASKS
            assert re.fullmatch(expected, rollout.failure if is_task else rollout.broke), (prompt.index, rollout)
            assert not (rollout.broke if is_task else rollout.failure), (prompt.index, rollout)
            assert rollout.reward == float(not expected) and len(rollout.turns) == 1 and rollout.drawn_tokens > 0
    deadline = time.monotonic() + 60
    while len(left := pids_of(bench.driver._environments)) > 1:  # that of the child that an answer left behind
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def episodes(folder: Path) -> None:
    """An episode has a judge of its own until it ends; one that dies costs no other episode."""
    fork_early()
    judges = started(settings(folder, f"{judged.__name__}.Sums"))
    turns = [said(str(prompt.index), prompt, last=False) for prompt in prompts(8)]
    first = answers(judges, *turns)
    assert len({answer.metrics["pid"] for answer in first.values()}) == 8 == len(pids_of(judges))
    second = answers(judges, *(said(str(index), None, last=False) for index in range(8)))
    assert second.pop("4") == CallFailure("its judge was killed by SIGKILL", of_answer=True)
    assert all(answer.reward == 1.0 and answer.metrics == first[name].metrics for name, answer in second.items())
    os.kill(int(first["2"].metrics["pid"]), signal.SIGKILL)
    judges.forget("3")
    third = answers(judges, *(said(str(index), None, last=False) for index in (0, 1, 2, 5)))
    assert third.pop("2") == CallFailure(LOST_WITH_JUDGE) and [answer.over for answer in third.values()] == [True] * 3
    again = answers(judges, *(said(str(prompt.index), prompt) for prompt in prompts(6, first=10)))
    assert {answer.metrics["pid"] for answer in again.values()} < {answer.metrics["pid"] for answer in first.values()}
    assert len(pids_of(judges)) == 6 and judges.seconds_left() is None


def shared(folder: Path) -> None:
    """With more open episodes than judges, they share judges."""
    group.MOST_JUDGES = 2
    fork_early()
    judges = started(settings(folder, f"{judged.__name__}.Sums"))
    for number in range(3):
        turns = [said(str(p.index), None if number else p, last=False) for p in prompts(4)]
        found = answers(judges, *turns)
        assert [answer.reward for answer in found.values()] == [1.0] * 4, found
        assert len({answer.metrics["pid"] for answer in found.values()}) == 2


def threaded(folder: Path) -> None:
    """An environment that starts threads is built in each judge."""
    fork_early()
    fork_early()
    judges = started(settings(folder, f"{__name__}.Threaded"))
    first, *_ = prompts(1)
    assert answers(judges, said("0", first, last=False))["0"].reward == 1.0
    assert answers(judges, said("0", None))["0"].reward == 1.0


def stained(folder: Path) -> None:
    """An answer does not suffer from what earlier answers left in a judge, and gets no more memory than the judge may have."""
    fork_early()
    judges = started(settings(folder, f"{__name__}.Stained"))
    for prompt in (*prompts(1), *prompts(2, first=3), *prompts(1), *prompts(1, first=3)):
        assert answers(judges, said("0", prompt))["0"].reward == 1.0
    (first,) = pids_of(judges)
    left_out = answers(judges, said("1", prompts(1, first=1)[0]))["1"]
    assert "ProcessStuck: threads that hang" in left_out.why and not left_out.of_answer
    much = answers(judges, said("2", prompts(1, first=2)[0]))["2"]
    assert (much.reward, much.metrics) == (0.25, {"crash": 1.0})
    assert answers(judges, said("3", prompts(1, first=3)[0]))["3"].reward == 1.0 and first not in pids_of(judges)


def lost(folder: Path) -> None:
    """If the process dies, its open episodes are left out, and other turns are judged by the next one."""
    fork_early()
    fork_early()
    judges = started(settings(folder, f"{judged.__name__}.Sums"))
    held, *others = prompts(3)
    answers(judges, said("held", held, last=False))
    kill(judges)
    found = answers(judges, *(said(str(prompt.index), prompt) for prompt in others), said("held", None))
    assert found.pop("held") == CallFailure(LOST_WITH_PROCESS)
    assert [answer.reward for answer in found.values()] == [1.0, 1.0]


def deadly(folder: Path) -> None:
    """An answer that kills the process twice is wrong."""
    for _ in range(3):
        fork_early()
    judges = started(settings(folder, f"{__name__}.Parricide"))
    first, second = prompts(2)
    found = answers(judges, said("0", first))["0"]
    assert found == CallFailure("the environments' process was killed by SIGKILL", of_answer=True)
    assert answers(judges, said("1", second))["1"].reward == 1.0


class Parricide(Environment):
    """An answer to prompt 0 kills the environments' process."""

    workers = 3

    def step(self, prompt, text):
        if prompt.index == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            NEVER.wait()
        time.sleep(0.2)
        return Outcome(1.0)


def deadly_among_others(folder: Path) -> None:
    """An answer that kills the process is wrong, and those beside it are judged."""
    for _ in range(3):
        fork_early()
    judges = started(settings(folder, f"{__name__}.Parricide"))
    rewards = answers(judges, *(said(str(prompt.index), prompt) for prompt in reversed(prompts(6))))
    assert rewards.pop("0") == CallFailure("the environments' process was killed by SIGKILL", of_answer=True)
    assert [outcome.reward for outcome in rewards.values()] == [1.0] * 5


class Forking(Environment):
    """An answer to prompt 0 makes a copy of its judge that goes on too."""

    def step(self, prompt, text):
        if prompt.index == 0:
            os.fork()
        return Outcome(float(prompt.index))


def forking(folder: Path) -> None:
    """A copy that an answer makes of its judge gives no reply, or none that counts."""
    fork_early()
    judges = started(settings(folder, f"{__name__}.Forking"))
    for number in (0, 1, 0, 2):
        outcome = answers(judges, said(str(number), prompts(1, first=number)[0]))[str(number)]
        assert outcome.reward == float(number), outcome


class Slow(Environment):
    """Takes so much CPU time that its judge is suspect."""

    workers = 2
    limits = JudgeLimits(suspect_s=0.001)

    def step(self, prompt, text):
        sum(range(1 << 20))
        return Outcome(1.0, {}, {"role": "user", "content": "w21"})


def forgotten(folder: Path) -> None:
    """A suspect judge ends with its episode, also if that is forgotten."""
    group.MOST_JUDGES = 3
    fork_early()
    judges = started(settings(folder, f"{__name__}.Slow"))
    for number in range(8):
        assert answers(judges, said(str(number), prompts(1)[0], last=False))[str(number)].reward == 1.0
        judges.forget(str(number))


class Broken(Environment):
    """Has no valid outcome for answers that break their judge."""

    def step(self, prompt, text):
        if prompt.index == 0:
            os._exit(1)
        return Outcome(1.0)

    def broken(self, how):
        return Outcome(0.0, {"how": how})


def broken(folder: Path) -> None:
    """A fault in `broken` makes the answer wrong, and no more."""
    fork_early()
    judges = started(settings(folder, f"{__name__}.Broken"))
    first, second = prompts(2)
    assert answers(judges, said("0", first))["0"] == CallFailure("its judge ended with status 1", of_answer=True)
    assert answers(judges, said("1", second))["1"].reward == 1.0


class Daemons(Environment):
    """An episode of prompt 0 has a program that goes on between its turns; others end their judge."""

    workers = 2

    def reset(self, prompt):
        return {"index": prompt.index}

    def step(self, episode, text):
        if episode["index"]:
            os._exit(3)
        if "pid" in episode:
            return Outcome(float(Path(f"/proc/{episode['pid']}").exists()))
        command = "setsid sleep 300 >/dev/null 2>&1 & echo $!"
        episode["pid"] = int(subprocess.run(command, shell=True, capture_output=True, check=True).stdout)
        return Outcome(0.0, {}, {"role": "user", "content": "w21"})


def daemons(folder: Path) -> None:
    """The end of a judge ends what it has left behind, and no program of another episode."""
    parent.ORPHANS_S = 0.1
    fork_early()
    judges = started(settings(folder, f"{__name__}.Daemons"))
    first, second = prompts(2)
    answers(judges, said("0", first, last=False))
    assert answers(judges, said("1", second))["1"].of_answer
    time.sleep(1.0)
    assert answers(judges, said("0", None))["0"].reward == 1.0


class Hanging(Environment):
    """Prompt 0: the answer leaves a thread that later holds the GIL. Prompt 1: it leaves its process group, and hangs."""

    def step(self, prompt, text):
        if prompt.index == 0:
            threading.Timer(0.1, hold_lock).start()
        if prompt.index == 1:
            os.setpgid(0, os.getpgid(os.getppid()))
            NEVER.wait()
        return Outcome(1.0)


def hanging(folder: Path) -> None:
    """An answer that leaves its judge hanging costs no later one, and a judge that leaves its process group is ended."""
    fork_early()
    judges = started(settings(folder, f"{__name__}.Hanging", limit_s=5.0))
    assert answers(judges, said("0", prompts(1)[0]))["0"].reward == 1.0
    time.sleep(0.5)
    assert answers(judges, said("2", prompts(1, first=2)[0]))["2"].reward == 1.0
    assert answers(judges, said("1", prompts(1, first=1)[0]))["1"].of_answer
    deadline = time.monotonic() + 60
    while pids_of(judges):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class LaterThreaded(judged.Sums):
    """Starts a thread as it is built, if a file exists."""

    def __init__(self, path: str) -> None:
        if Path(path).exists():
            threading.Thread(target=NEVER.wait, daemon=True).start()


def threaded_later(folder: Path) -> None:
    """Turns are judged if only a replacement of the process starts threads."""
    path = folder.parent / f"threads of {os.getpid()}"
    for _ in range(3):
        fork_early()
    judges = started(settings(folder, f"{__name__}.LaterThreaded", path=str(path)))
    path.touch()
    kill(judges)
    outcomes = answers(judges, *(said(str(prompt.index), prompt) for prompt in prompts(2)))
    assert [outcome.reward for outcome in outcomes.values()] == [1.0, 1.0]


def idle_deaths(folder: Path) -> None:
    """A process that always dies ends the run; one that judges between its deaths does not."""
    for _ in range(2 * pool.MAX_DEATHS + 1):
        fork_early()
    judges = started(settings(folder, "exact_match"))

    for death in range(2 * pool.MAX_DEATHS):
        if death == pool.MAX_DEATHS:
            answers(judges, said("0", prompts(1)[0]))
        kill(judges)
        status(judges)
        assert judges.take() == []
    kill(judges)
    status(judges)
    with raises(RuntimeError, "was killed by SIGKILL; it has ended 4 times in a row without judging anything"):
        judges.take()


def errors(folder: Path) -> None:
    """An error in building environments is raised on the rank as if they were built there."""
    fork_early()
    with raises(ValueError, rf"env\.told: kind {__name__}\.Holding: kwargs do not fit Holding"):
        started(settings(folder, f"{__name__}.Holding", no=1))


def garbled(folder: Path) -> None:
    """A command that cannot be decoded ends the process at once, and the rank raises the cause."""
    fork_early()
    judges = started(settings(folder, "exact_match"))
    process_of(judges).send("no command")
    with raises(RuntimeError, "ValidationError: Expected `array`, got `str`"):
        answers(judges, said("0", prompts(1)[0]))
    assert status(judges) == 0


def orderly(folder: Path) -> None:
    """A signal that tells the rank to leave does not end the processes; `close` does, and closes the environments."""
    closed = folder.parent / f"closed by {os.getpid()}"
    fork_early()
    judges = started(settings(folder, f"{judged.__name__}.Closing", path=str(closed)))
    process = process_of(judges)
    assert answers(judges, said("0", prompts(1)[0]))["0"].reward == 1.0
    (judge,) = pids_of(judges)
    for pid, name, score in ((process.pid, "hetstep-env", "500"), (judge, "hetstep-judge", "750")):
        assert Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == f"{score}\n"
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert answers(judges, said("1", prompts(1)[0]))["1"].reward == 1.0
    assert process_of(judges) is process and pids_of(judges) == [judge]
    judges.close()
    assert process.status == 0 and closed.read_text() == "closed closed "


def leave(folder: Path, notes: Path) -> None:
    """The rank is killed while a judge holds the GIL and a program runs in the sandbox."""
    fork_early()
    judges = started(settings(folder, f"{__name__}.Holding", notes=str(notes)))
    judges.submit(said("0", prompts(1)[0]))
    deadline = time.monotonic() + 120
    while not (notes / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def executed(folder: Path) -> None:
    """The process is started as a program where it cannot be a fork."""
    judges = started(settings(folder, "exact_match"))
    pid = process_of(judges).pid
    assert b"pipeline.rollout.judges.parent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert answers(judges, said("0", prompts(1)[0]))["0"].metrics["accuracy"] == 0
    judges.close()
    assert process_of(judges).status == 0
