"""The process of an engine's environments, as the engine's rank sees it.

What environments compute there does not hold Python's lock in the engine's process, and their crashes end only that process. If
it dies (of the memory that an answer uses, of a library's crash), or if a call holds Python's lock so long that no report
arrives, another process replaces it.

An answer that kills the process is wrong. If the process was judging only one turn, that turn is the cause. If it was judging
several, the turns that begin an episode are judged again by the next process, one at a time, and those that kill it are wrong.
Other turns cannot be judged again, because their environments' state is lost. They are wrong if none of the retried turns was
the cause; otherwise they fail without being wrong, and so do episodes whose state the process held for their next turn.

Two threads of the rank carry the messages, so neither end ever waits for the other one to read.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from pipeline.rollout import environment_server
from pipeline.rollout.environment_pool import CLOSE_S, CallFailure
from pipeline.rollout.environment_server import HEARTBEAT_S, MAX_OPEN_CALLS, EnvCommand, EnvReport, frame, messages
from pipeline.rollout.environment_threads import EnvironmentExecutor, EnvironmentSettings, StepOutcome, StepRequest, is_final

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
SILENCE_LIMIT_S = 30.0
"""Time without a report, beyond the longest `timeout_s`, after which the process is replaced. Imports hold the lock too."""
MAX_IDLE_DEATHS = 3
"""Most consecutive deaths while nothing was judged. One more ends the run, because its environments cannot run here."""
LOAD_SHARE = 5 / 6
"""Share of cluster.timeouts.setup for building all environments. The message of that timeout would not name them."""
LOST_WITH_PROCESS = "the environments' process that held the episode has ended"


class ProcessHandle(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        ...

    def kill(self) -> None:
        """Kill the process if it runs."""

    def wait(self, timeout: float) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        ...


class _Forked(ProcessHandle):
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid, self._status = pid, None

    @override
    def poll(self) -> int | None:
        if self._status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status

    @override
    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    @override
    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("environments", timeout)
            time.sleep(0.01)
        return status


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that waits for its settings."""

    handle: ProcessHandle
    connection: socket.socket
    judging: mmap.mmap  # [MAX_OPEN_CALLS] bytes


_early: list[StartedProcess] = []


def spawn() -> StartedProcess:
    """Start a process that shares nothing with this one. It ends with the thread that calls this."""
    ours, its = socket.socketpair()
    memory = os.memfd_create("judging")
    os.ftruncate(memory, MAX_OPEN_CALLS)
    judging = mmap.mmap(memory, MAX_OPEN_CALLS)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", environment_server.__name__, str(its.fileno()), str(memory), str(os.getpid())]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(its.fileno(), memory), env={**os.environ, "PYTHONPATH": path}
        )
    finally:
        its.close()
        os.close(memory)
    return StartedProcess(process, ours, judging)


def fork_early() -> None:
    """Fork a process for the next `EnvironmentProcess` of this process, which inherits all imported modules.

    Call it in the main thread before there is another thread, and before anything looks for a GPU.
    """
    ours, its = socket.socketpair()
    judging, rank = mmap.mmap(-1, MAX_OPEN_CALLS), os.getpid()
    if pid := os.fork():
        its.close()
        _early.append(StartedProcess(_Forked(pid), ours, judging))
        return
    status = 1
    try:
        ours.close()
        environment_server.run(its, judging, rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _next() -> StartedProcess:
    return _early.pop() if _early else spawn()


class _Process:
    """One process from its start to its end."""

    def __init__(self, started: StartedProcess, settings: EnvironmentSettings, wakeup: threading.Event) -> None:
        self.handle, self.judging = started.handle, started.judging
        self.reports: queue.SimpleQueue[EnvReport | None] = queue.SimpleQueue()  # None: the last one
        self.loaded = False
        self._connection, self._wakeup = started.connection, wakeup
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unsent.put(frame(settings))
        self._reader = threading.Thread(target=self._read, name="environment reports", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="environment commands", daemon=True).start()

    def send(self, command: EnvCommand) -> None:
        """Queue a command; does not wait."""
        self._unsent.put(frame(command))

    def _write(self) -> None:
        """Send queued commands, all at once."""
        while content := self._unsent.get():
            parts = [content]
            while not self._unsent.empty():
                parts.append(self._unsent.get())
            try:
                self._connection.sendall(b"".join(parts))
            except OSError:
                return  # the process is gone, as `_read` notices
            if not parts[-1]:
                return

    def _read(self) -> None:
        try:
            for report in messages(self._connection.makefile("rb"), EnvReport):
                self.reports.put(report)
                self._wakeup.set()
        except OSError:
            pass  # the process is gone
        except Exception as error:  # a report that cannot be decoded
            self.reports.put(EnvReport.of(error))
        finally:
            self.reports.put(None)
            self._wakeup.set()

    def ended(self) -> bool:
        """Return whether the process has ended. Then all of its reports are in `reports`."""
        if self.handle.poll() is None:
            return False
        self._reader.join(HEARTBEAT_S)  # a process that it forked may hold the connection open
        return True

    def end(self) -> str:
        """Kill the process if it runs; return how it ended."""
        self.handle.kill()
        status = self.handle.wait(CLOSE_S)
        self._unsent.put(b"")
        self._connection.shutdown(socket.SHUT_RDWR)
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    @property
    def worn_out(self) -> bool:
        """True if the process requested its replacement."""
        return self.handle.poll() == environment_server.EXIT_WORN_OUT

    def close(self) -> None:
        """Let the process close its environments; kill it if it does not end in time."""
        self.send(EnvCommand())
        try:
            self.handle.wait(CLOSE_S + HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            pass
        self.end()


class EnvironmentProcess(EnvironmentExecutor):
    """Runs environments in a process of their own, for the thread that creates it."""

    def __init__(self, settings: EnvironmentSettings, wakeup: threading.Event) -> None:
        """Start the process without waiting until the environments are loaded."""
        self._settings, self._wakeup = settings, wakeup
        longest = max((environment.timeout_s for environment in settings.env.values()), default=0.0)
        self._silence_limit_s = longest + settings.grace_s + SILENCE_LIMIT_S
        self._process = _Process(_next(), settings, wakeup)
        self._number = 0
        self._calls: dict[int, StepRequest] = {}  # without an answer
        self._held: dict[str, _Process] = {}  # process of each episode that has not ended
        self._failed: list[tuple[str, CallFailure]] = []  # failures that no environment reported
        self._to_retry: deque[StepRequest] = deque()  # turns that a process was judging when it died; each is retried alone
        # Likewise turns that cannot be judged again, and how the process died.
        self._not_retryable: list[tuple[StepRequest, str]] = []
        self._retrying = False  # whether retries have not ended
        self._waiting: deque[StepRequest] = deque()  # turns that wait for the retries
        self._silent_s, self._checked_at = 0.0, time.monotonic()
        self._idle_deaths = 0

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait for the environments, without limit if timeout_s is None. Raises the error of building them, or RuntimeError."""
        try:
            report = self._process.reports.get(timeout=timeout_s)
        except queue.Empty:
            self._process.end()
            what = f"the environments' process has not loaded {', '.join(self._settings.env)}"
            raise RuntimeError(f"env: {what} within {timeout_s:g} s") from None
        self._take(report)
        if not self._process.loaded:
            raise RuntimeError(f"the environments' process {self._process.end()} before its environments were loaded")

    @override
    def submit(self, request: StepRequest) -> None:
        if request.prompt is not None:
            self._held[request.episode] = self._process
        elif self._held[request.episode] is not self._process:
            self._fail_lost([request])
            return
        if self._retrying:
            self._waiting.append(request)
        else:
            self._send(request)

    def _send(self, request: StepRequest) -> None:
        if not self._calls:
            self._silent_s = 0.0
        self._number = (self._number + 1) % MAX_OPEN_CALLS
        self._calls[self._number] = request
        self._process.judging[self._number] = 0
        self._process.send(EnvCommand(self._number, request))

    @override
    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = self._take_reports()
        if self._process.ended():
            answers += self._take_reports()
            self._replace_process(self._process.end())
        elif self._is_silent():
            self._process.end()
            self._replace_process(
                f"sent no report for {self._silence_limit_s:g} s (one of its calls holds Python's lock) and was killed"
            )
        self._retry_next()
        failed, self._failed = self._failed, []
        for episode, _ in failed:
            self.forget(episode)
        return answers + failed

    @override
    def seconds_left(self) -> float | None:
        if self._failed:
            return 0.0
        return HEARTBEAT_S if self._calls else None

    @override
    def forget(self, episode: str) -> None:
        if self._held.pop(episode, None) is self._process:
            self._process.send(EnvCommand(forget=episode))

    @override
    def close(self) -> None:
        self._process.close()

    def _take_reports(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = []
        while not self._process.reports.empty():
            answers += self._take(self._process.reports.get())
        return answers

    def _take(self, report: EnvReport | None) -> list[tuple[str, StepOutcome | CallFailure]]:
        if report is None:
            return []
        if report.error:
            kind = ValueError if report.error in ("ValueError", "RecipeError") else RuntimeError
            message = report.message if report.error in (kind.__name__, "RecipeError") else f"{report.error}: {report.message}"
            error = kind(message)
            error.add_note(f"Traceback of the environments' process:\n{report.traceback}")
            raise error
        self._process.loaded, self._silent_s = True, 0.0
        if report.replies:
            self._idle_deaths = 0
        answers = []
        for reply in report.replies:
            request = self._calls.pop(reply.call)
            answer = CallFailure(reply.failure, reply.of_answer) if reply.outcome is None else reply.outcome
            if is_final(request, answer):
                self._held.pop(request.episode, None)
            answers.append((request.episode, answer))
        return answers

    def _is_silent(self) -> bool:
        """Return whether no report has arrived for too long.

        Each check counts for at most one heartbeat, because both processes may have been stopped together.
        """
        now = time.monotonic()
        if self._calls and self._process.loaded:
            self._silent_s += min(now - self._checked_at, HEARTBEAT_S)
        self._checked_at = now
        return self._silent_s > self._silence_limit_s

    def _replace_process(self, how: str) -> None:
        """Start another process in place of one that has ended, and decide what becomes of its turns."""
        dead, calls, self._calls = self._process, self._calls, {}
        judged = [request for call, request in calls.items() if dead.judging[call]]
        others = [request for call, request in calls.items() if not dead.judging[call]]
        self._idle_deaths = 0 if judged or dead.worn_out else self._idle_deaths + 1
        why = f"the environments' process {how}"
        if self._idle_deaths > MAX_IDLE_DEATHS:
            raise RuntimeError(f"{why}; it has ended {self._idle_deaths} times in a row without judging anything")
        logger.warning(f"{why} while it judged {len(judged)} turns; another process takes its place")
        self._process, self._silent_s = _Process(_next(), self._settings, self._wakeup), 0.0
        running = dead.judging[:].count(1)  # includes abandoned calls, which have been answered
        if dead.worn_out:
            others, judged = judged + others, []
        elif len(judged) == running == 1:
            self._failed.append((judged[0].episode, CallFailure(why, of_answer=True)))
            self._fail_lost([request for request, _ in self._not_retryable])
            judged, self._not_retryable = [], []
        again = [request for request in judged if request.prompt is not None]
        held = [request for request in judged if request.prompt is None]
        if running > len(judged):
            self._fail_lost(held)
        else:
            self._not_retryable += [(request, why) for request in held]
        self._to_retry += again
        self._waiting.extendleft(reversed(others))
        self._fail_lost([request for request in self._waiting if request.prompt is None])
        self._waiting = deque(request for request in self._waiting if request.prompt is not None)
        self._retrying = bool(self._retrying or self._to_retry or self._not_retryable)

    def _fail_lost(self, turns: list[StepRequest]) -> None:
        """Fail turns of episodes that ended with their process, without counting them as wrong."""
        self._failed += [(request.episode, CallFailure(LOST_WITH_PROCESS)) for request in turns]

    def _retry_next(self) -> None:
        """Send the next turn to retry if none is being judged, and finally the turns that waited for the retries."""
        if self._retrying and self._calls:
            return
        if self._to_retry:
            self._resend(self._to_retry.popleft())
            return
        self._failed += [(request.episode, CallFailure(why, of_answer=True)) for request, why in self._not_retryable]
        self._not_retryable, self._retrying = [], False
        while self._waiting:
            self._resend(self._waiting.popleft())

    def _resend(self, request: StepRequest) -> None:
        self._held[request.episode] = self._process
        self._send(request)
