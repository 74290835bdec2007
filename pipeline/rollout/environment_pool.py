"""Run environments in threads: a bounded number for each, and a time limit for each call.

A call that raises, or exceeds its limit, ends only its own episode. Python cannot end a thread. So a thread that hangs is
abandoned: its answer is ignored, and another thread replaces it. If too many hang, the process is worn out: another process
replaces it, or, if the threads are the engine's own, the run ends.

The resources of a call are not limited here; for code that a model wrote see `pipeline/sandbox`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pipeline.environments.environment import Environment, ProcessStuck, Unjudged
from pipeline.sandbox.limits import SandboxError

logger = logging.getLogger(__name__)

GRACE_S = 2.0  # extra time for an environment with a time limit of its own to end what it started
MAX_HANGING_CALLS = 64  # hanging calls of one environment
PARTS_BEFORE_ANSWER = ("", "reset")  # parts of a call that have not seen the answer, so that it cannot cause a failure in them
CLOSE_S = 10.0
LOG_INTERVAL_S = 30.0  # least time between two log lines about failures of an environment, after the first few
LOGGED_AT_ONCE = 5
TRACEBACK_CHARS = 4000  # the last characters of a traceback

Begin = Callable[[str], None]
"""A call reports which of its parts begins, such as "reset" or "step". The limit holds for each part."""

Call = Callable[[Begin], Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The end of a call without a result."""

    why: str
    of_answer: bool = False  # an answer can cause it, and is then wrong
    traceback: str = ""


class EnvironmentPool(Generic[Key]):
    """Environments by name. `submit`, `take` and `seconds_left` are for one thread, which `wakeup` signals."""

    def __init__(
        self,
        environments: dict[str, Environment],
        limits_s: dict[str, float],  # of each `reset` or `step`
        wakeup: threading.Event,
        grace_s: float = GRACE_S,
    ):
        self._environments = environments
        self._pools = {
            name: _ThreadPool(name, environment.workers, limits_s[name], grace_s, wakeup)
            for name, environment in environments.items()
        }

    def submit(self, environment: str, key: Key, call: Call) -> None:
        """Run a call in a thread of `environment`. `take` returns its result with `key`."""
        self._pools[environment].submit(key, call)

    def take(self) -> list[tuple[Key, Any]]:
        """Return (key, result or CallFailure) of the calls that have ended or been abandoned since. Does not wait.

        Raises WornOut if too many calls hang, after returning the others' results.
        """
        return [answer for pool in self._pools.values() for answer in pool.take()]

    def seconds_left(self) -> float | None:
        """Return the seconds until a running call exceeds its limit; None if no call is open."""
        ends = [end for pool in self._pools.values() if (end := pool.first_end()) is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def close(self) -> None:
        """Close the environments, and wait at most CLOSE_S for it."""

        def close() -> None:
            for name, environment in self._environments.items():
                try:
                    environment.close()
                except Exception as error:
                    logger.warning(f"env.{name}: close raised {_brief(error)}")

        thread = threading.Thread(target=close, name="close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)


class _ThreadPool:
    """The threads of one environment, started on demand."""

    def __init__(self, name: str, size: int, limit_s: float, grace_s: float, wakeup: threading.Event):
        self._name, self._size, self._limit_s, self._grace_s, self._wakeup = name, size, limit_s, grace_s, wakeup
        self._calls: queue.SimpleQueue[tuple[Hashable, Call]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Hashable, Any]] = queue.SimpleQueue()
        self._workers: list[_WorkerThread] = []
        self._hanging: list[_WorkerThread] = []  # abandoned
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
        """Return the time at which to check the first call, or to look again if none has begun."""
        if not self._open:
            return None
        begun = [running.begun for worker in self._workers if (running := worker.running)]
        return min(begun, default=time.monotonic()) + self._limit_s + self._grace_s

    def take(self) -> list[tuple[Any, Any]]:
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
        while not self._answers.empty():  # no other thread takes
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
                f"env.{self._name}: {len(self._hanging)} calls hang at the same time, each for more than {self._limit_s:g} s"
                f" (env.{self._name}.timeout_s); such a call must end itself"
            )


@dataclass(eq=False, slots=True)
class _Running:
    key: Hashable
    part: str  # of the call
    begun: float


class _WorkerThread(threading.Thread):
    """Runs one call after another, until it is abandoned."""

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
            except BaseException as error:  # SystemExit too, which would end this thread silently
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
                raise RuntimeError("it was abandoned")  # its result would be ignored
            self.running = _Running(key, part, time.monotonic())

    def give_up(self, running: _Running) -> bool:
        """Ignore what runs from now on; return False if it has ended meanwhile."""
        with self._lock:
            self._given_up = self.running is running
            return self._given_up


class _FailureLog:
    """Logs one line for each failure, with the first one's traceback; if there are many, one line in LOG_INTERVAL_S."""

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
        others = f" (and {self._suppressed} others before that were not logged)" if self._suppressed else ""
        what = "broke its environment and counts as wrong" if failure.of_answer else "failed"
        first = "" if self._lines else "\n" + encodable(failure.traceback[-TRACEBACK_CHARS:])
        logger.warning(f"env.{self._environment}: {key} {what}: {failure.why}{others}{first.rstrip()}")
        self._lines, self._suppressed, self._last = self._lines + 1, 0, now


def _brief(error: BaseException) -> str:
    """Return one line with an error and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return encodable(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{where}")


def encodable(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode (half a surrogate pair, which a model can write as JSON)."""
    return text.encode(errors="backslashreplace").decode()
