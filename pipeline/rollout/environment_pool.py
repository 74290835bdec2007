"""Run environments in threads beside the engine: a bounded number for each, and a limit for each call.

A call that raises, or outlasts its limit, ends its episode alone. Nothing can end a thread: one that hangs is given up, which
means that its answer is not waited for any more, and another takes its place. Where too many hang, the process is worn out:
another takes its place too, or, where the threads are the engine's own, the run ends.

Leaves out: what a call uses up meanwhile (see pipeline/sandbox for code that a model wrote).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from pipeline.environments.base import Environment, ProcessStuck, Unjudged
from pipeline.sandbox.limits import SandboxError

GRACE_S = 2.0  # an environment that keeps its own time has so long to end what it started
MAX_HANGING_CALLS = 64  # calls of one environment
PARTS_BEFORE_ANSWER = ("", "reset")  # of a call: what fails in them is not the answer's doing, which they have not seen
CLOSE_S = 10.0
LOG_INTERVAL_S = 30.0  # a line about failures of an environment at most so often, after the first few
LOGGED_AT_ONCE = 5
TRACEBACK_CHARS = 4000  # characters of one, its last

Begin = Callable[[str], None]
"""A call says which part of it begins, such as "reset" or "step"; the limit is for each part."""

Call = Callable[[Begin], Any]


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The end of a call that has no result."""

    why: str
    of_answer: bool = False  # an answer can cause it, and is then a wrong one
    traceback: str = ""


class EnvironmentPool:
    """Environments by name.

    One thread calls `submit`, `take` and `seconds_left`; `wakeup` is set when there is something to take.
    """

    def __init__(
        self,
        environments: dict[str, Environment],
        limits_s: dict[str, float],  # of one `reset` or `step`
        wakeup: threading.Event,
        grace_s: float = GRACE_S,
    ):
        self._environments = environments
        self._pools = {
            name: _ThreadPool(name, environment.workers, limits_s[name], grace_s, wakeup)
            for name, environment in environments.items()
        }

    def submit(self, environment: str, key: Hashable, call: Call) -> None:
        self._pools[environment].submit(key, call)

    def take(self) -> list[tuple[Hashable, Any]]:
        """Return (key, result or CallFailure) of the calls that have ended or were given up since. Does not wait.

        Raises ProcessStuck if calls that hang are too many, once the others' answers have been taken.
        """
        return [answer for pool in self._pools.values() for answer in pool.take()]

    def seconds_left(self) -> float | None:
        """Return how long until a running call is given up; None if there is none."""
        ends = [end for pool in self._pools.values() if (end := pool.first_end()) is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def close(self) -> None:
        """Close the environments, but do not wait long for one that does not end."""

        def close() -> None:
            for name, environment in self._environments.items():
                try:
                    environment.close()
                except Exception as error:
                    print(f"hetstep: env.{name}: close raised {_brief(error)}", flush=True)

        thread = threading.Thread(target=close, name="close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class _ThreadPool:
    """The threads of one environment. They come as they are needed."""

    def __init__(self, name: str, size: int, limit_s: float, grace_s: float, wakeup: threading.Event):
        self._name, self._size, self._limit_s, self._grace_s, self._wakeup = name, size, limit_s, grace_s, wakeup
        self._calls: queue.SimpleQueue[tuple[Hashable, Call]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Hashable, Any]] = queue.SimpleQueue()
        self._workers: list[_WorkerThread] = []
        self._hanging: list[_WorkerThread] = []  # given up
        self._open = 0  # calls without an answer
        self._worn_out: ProcessStuck | None = None
        self._log = _FailureLog(name)

    def submit(self, key: Hashable, call: Call) -> None:
        self._open += 1
        self._calls.put((key, call))
        self._fill()

    def _fill(self) -> None:
        while len(self._workers) < min(self._size, self._open):
            self._workers.append(_WorkerThread(self._name, self._calls, self._answers, self._wakeup))

    def first_end(self) -> float | None:
        """Return when a call is to be given up, or to be looked at again, as it has not begun yet."""
        if not self._open:
            return None
        begun = [running.begun for worker in self._workers if (running := worker.running)]
        return min(begun, default=time.monotonic()) + self._limit_s + self._grace_s

    def take(self) -> list[tuple[Hashable, Any]]:
        self._check_worn_out()
        late = time.monotonic() - self._limit_s - self._grace_s
        for worker in list(self._workers):
            running = worker.running
            if running and running.begun < late and worker.give_up(running):
                self._workers.remove(worker)
                self._hanging.append(worker)
                why = f"{running.part} took more than {self._limit_s:g} s (env.{self._name}.timeout_s)"
                self._answers.put((running.key, CallFailure(why, running.part not in PARTS_BEFORE_ANSWER)))
        answers = []
        while not self._answers.empty():  # nobody else takes
            key, result = self._answers.get()
            if isinstance(result, ProcessStuck):  # the call has no answer
                self._worn_out = result
                continue
            answers.append((key, result))
            if isinstance(result, CallFailure):
                self._log.log(key, result)
        self._open -= len(answers)
        self._fill()
        if self._worn_out:
            self._wakeup.set()
        return answers

    def _check_worn_out(self) -> None:
        if self._worn_out:
            raise ProcessStuck(f"env.{self._name}: {self._worn_out}", self._worn_out.caused_by_answer)
        self._hanging = [worker for worker in self._hanging if worker.is_alive()]
        if len(self._hanging) > MAX_HANGING_CALLS:
            raise ProcessStuck(
                f"env.{self._name}: {len(self._hanging)} calls of it hang at once, each for more than {self._limit_s:g} s"
                f" (env.{self._name}.timeout_s); a call that takes longer must end itself"
            )


@dataclass(eq=False, slots=True)
class _Running:
    key: Hashable
    part: str  # of the call
    begun: float


class _WorkerThread(threading.Thread):
    """Runs one call after another, until it is given up."""

    def __init__(self, environment: str, calls: queue.SimpleQueue, answers: queue.SimpleQueue, wakeup: threading.Event):
        super().__init__(name=f"environment {environment}", daemon=True)
        self.running: _Running | None = None
        self._calls, self._answers, self._wakeup = calls, answers, wakeup
        self._lock = threading.Lock()
        self._given_up = False
        self.start()

    def run(self) -> None:
        while not self._given_up:
            key, call = self._calls.get()
            try:
                result = call(lambda part, key=key: self._begin(key, part))
            except ProcessStuck as error:
                result = error
            except BaseException as error:  # SystemExit too: an environment's, it would end this thread without a word
                part = self.running.part if self.running else ""
                of_answer = part not in PARTS_BEFORE_ANSWER and not isinstance(error, Unjudged | SandboxError)
                result = CallFailure(f"{part or 'it'} raised {_brief(error)}", of_answer, traceback.format_exc())
            with self._lock:
                self.running = None
                if not self._given_up:
                    self._answers.put((key, result))
            self._wakeup.set()

    def _begin(self, key: Hashable, part: str) -> None:
        with self._lock:
            if self._given_up:
                raise RuntimeError("it was given up")  # nobody waits for what it would do
            self.running = _Running(key, part, time.monotonic())

    def give_up(self, running: _Running) -> bool:
        """Stop waiting for what runs; return False if it has ended meanwhile."""
        with self._lock:
            self._given_up = self.running is running
            return self._given_up


class _FailureLog:
    """One line for each failure, and the first one's traceback; where they come in masses, one line now and then."""

    def __init__(self, environment: str):
        self._environment = environment
        self._lines = 0
        self._suppressed = 0
        self._last = 0.0

    def log(self, key: Hashable, failure: CallFailure) -> None:
        now = time.monotonic()
        if self._lines >= LOGGED_AT_ONCE and now < self._last + LOG_INTERVAL_S:
            self._suppressed += 1
            return
        others = f" (and {self._suppressed} others before that were not told)" if self._suppressed else ""
        what = "broke its judge, and counts as wrong" if failure.of_answer else "failed"
        first = "" if self._lines else "\n" + encodable(failure.traceback[-TRACEBACK_CHARS:])
        print(f"hetstep: env.{self._environment}: {key} {what}: {failure.why}{others}{first.rstrip()}", flush=True)
        self._lines, self._suppressed, self._last = self._lines + 1, 0, now


def _brief(error: BaseException) -> str:
    """Return one line: what an error is, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return encodable(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{where}")


def encodable(text: str) -> str:
    """Write what UTF-8 has no bytes for (half a surrogate pair, which a model can write as JSON) as its code."""
    return text.encode(errors="backslashreplace").decode()
