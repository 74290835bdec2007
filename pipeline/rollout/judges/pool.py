"""The pool of an engine's judges, as the engine's rank sees it.

The rank starts one process (`parent.py`), which forks the judges. What environments compute does not hold Python's lock in the
engine's process. If that process dies, another one replaces it. First turns are judged again, alone if a judge had taken them;
an answer during which the process dies again is wrong. Episodes of several turns that had begun are left out.

Two threads of the rank carry the messages, so neither end ever waits for the other one to read.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from pipeline.files.encoding import encode
from pipeline.rollout.judges import parent
from pipeline.rollout.judges.environment_steps import (
    CallFailure,
    EnvironmentSettings,
    Judges,
    StepOutcome,
    StepRequest,
    is_final,
)
from pipeline.rollout.judges.group import CLOSE_S
from pipeline.rollout.judges.judge_process import EnvCommand, EnvReply, frame, how_ended, messages
from pipeline.rollout.judges.parent import EnvReport

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
LOOK_S = 1.0  # between two looks at the process while calls are open
MAX_DEATHS = 3
"""Most consecutive deaths of the process without an answer. One more death ends the run."""
LOAD_SHARE = 5 / 6
"""Share of cluster.timeouts.setup for building all environments. The message of that timeout would not name them."""
LOST_WITH_PROCESS = "the environments' process that held the episode has ended"
SCORED_ELSEWHERE = StepOutcome(0.0, {}, over=True, observation=None)
"""The outcome of a turn that a reward model scores on other ranks."""


@dataclass(eq=False)
class StartedProcess:
    """A child process that waits for its settings."""

    pid: int
    connection: socket.socket
    status: int | None = None  # once it has ended

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(found[1])
        return self.status

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status; None if the process still runs after so long."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.status


_early: list[StartedProcess] = []


def spawn() -> StartedProcess:
    """Start a process that shares nothing with this one. It ends with the thread that calls this."""
    ours, its = socket.socketpair()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", parent.__name__, str(its.fileno()), str(os.getpid())]
    its.set_inheritable(True)
    try:
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        pid = os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": path}, file_actions=[nothing])
    finally:
        its.close()
    return StartedProcess(pid, ours)


def fork_early() -> None:
    """Fork a process for the next `JudgePool` of this process, which inherits all imported modules.

    Call it in the main thread before there is another thread, and before anything looks for a GPU.
    """
    ours, its = socket.socketpair()
    rank = os.getpid()
    if pid := os.fork():
        its.close()
        _early.append(StartedProcess(pid, ours))
        return
    status = 1
    try:
        ours.close()
        parent.run(its, rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


class _Process:
    """One process from its start to its end."""

    def __init__(self, started: StartedProcess, settings: EnvironmentSettings, wakeup: threading.Event) -> None:
        self.started = started
        self.reports: queue.SimpleQueue[EnvReport | None] = queue.SimpleQueue()  # None: the last one
        self.loaded = False
        self._wakeup = wakeup
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unsent.put(frame(settings))
        self._reader = threading.Thread(target=self._read, name="judges' reports", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="judges' commands", daemon=True).start()

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
                self.started.connection.sendall(b"".join(parts))
            except OSError:
                return  # the process is gone, as `_read` notices
            if not parts[-1]:
                return

    def _read(self) -> None:
        try:
            for report in messages(self.started.connection.makefile("rb"), EnvReport):
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
        if self.started.poll() is None:
            return False
        self._reader.join(LOOK_S)
        return True

    def end(self) -> str:
        """Kill the process if it runs; return how it ended."""
        self.started.kill()
        status = self.started.wait(CLOSE_S)
        self._unsent.put(b"")
        self.started.connection.shutdown(socket.SHUT_RDWR)
        return "does not end" if status is None else how_ended(status)

    def close(self) -> None:
        """Let the process close its environments; kill it if it does not end in time."""
        self.send(EnvCommand())
        self.started.wait(2 * CLOSE_S + LOOK_S)
        self.end()


class JudgePool(Judges):
    """Judges turns in forks, for the thread that creates it."""

    def __init__(self, settings: EnvironmentSettings, wakeup: threading.Event) -> None:
        """Start the process, without waiting until the environments are loaded. None is started where there is none to load."""
        self._settings, self._wakeup = settings, wakeup
        self._elsewhere = {name for name, environment in settings.env.items() if environment.kind == "reward_model"}
        self._process = self._next() if settings.env.keys() - self._elsewhere else None
        self._number = 0
        self._calls: dict[int, StepRequest] = {}  # without an answer
        self._begun: set[int] = set()  # calls that a judge has taken
        self._waiting: deque[StepRequest] = deque()  # requests that are not sent yet
        self._suspects: deque[StepRequest] = deque()  # requests that were judged when the process died; judged again, alone
        self._alone = False  # the only open call is a suspect
        self._held: dict[str, _Process] = {}  # process of each episode that has not ended
        self._answers: list[tuple[str, StepOutcome | CallFailure]] = []  # that no judge gave
        self._deaths = 0

    def _next(self) -> _Process:
        return _Process(_early.pop() if _early else spawn(), self._settings, self._wakeup)

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait for the environments, without limit if timeout_s is None. Raises the error of building them, or RuntimeError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._process is not None and not self._process.loaded:
            try:
                report = self._process.reports.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._process.end()
                what = f"the environments' process has not loaded {', '.join(self._settings.env)}"
                raise RuntimeError(f"env: {what} within {timeout_s:g} s") from None
            if report is None:
                raise RuntimeError(f"the environments' process {self._process.end()} before its environments were loaded")
            self._take(report)

    @override
    def submit(self, request: StepRequest) -> None:
        if request.environment in self._elsewhere:
            self._answers.append((request.episode, SCORED_ELSEWHERE))
            return
        self._waiting.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send the requests that wait; after a death, first the suspects, one at a time."""
        if self._calls and (self._suspects or self._alone):
            return
        self._alone = bool(self._suspects)
        if self._suspects:
            self._send(self._suspects.popleft())
        while self._waiting and not self._alone:
            self._send(self._waiting.popleft())

    def _send(self, request: StepRequest) -> None:
        assert self._process is not None
        begins = request.prompt is not None
        if begins:
            self._held[request.episode] = self._process
        elif self._held[request.episode] is not self._process:
            self._answers.append((request.episode, CallFailure(LOST_WITH_PROCESS)))
            return
        self._number += 1
        self._calls[self._number] = request
        self._process.send(
            EnvCommand(self._number, request.episode, encode(request), request.environment, request.title, begins)
        )

    @override
    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = self._take_reports()
        if self._process is not None and self._process.ended():
            answers += self._take_reports()
            self._replace(self._process.end())
        self._dispatch()
        others, self._answers = self._answers, []
        for episode, _ in others:
            self.forget(episode)
        return answers + others

    @override
    def seconds_left(self) -> float | None:
        if self._answers:
            return 0.0
        return LOOK_S if self._calls else None

    @override
    def forget(self, episode: str) -> None:
        if self._held.pop(episode, None) is self._process and self._process is not None:
            self._process.send(EnvCommand(episode=episode))

    @override
    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _take_reports(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = []
        while self._process is not None and not self._process.reports.empty():
            report = self._process.reports.get()
            answers += self._take(report) if report is not None else []
        return answers

    def _take(self, report: EnvReport) -> list[tuple[str, StepOutcome | CallFailure]]:
        assert self._process is not None
        if report.error:
            kind = ValueError if report.error in ("ValueError", "RecipeError") else RuntimeError
            message = report.message if report.error in (kind.__name__, "RecipeError") else f"{report.error}: {report.message}"
            error = kind(message)
            error.add_note(f"Traceback of the environments' process:\n{report.traceback}")
            raise error
        if report.apart:
            logger.info(f"{', '.join(report.apart)} started threads while loading, so each judge loads its own copy")
            self._process.close()
            self._settings = dataclasses.replace(self._settings, apart=self._settings.apart | report.apart)
            self._process = self._next()
            self._waiting.extendleft(reversed(self._calls.values()))
            self._calls = {}
            return []
        self._process.loaded = True
        self._begun.update(report.begun)
        if report.replies:
            self._deaths = 0
        return [self._answer(reply) for reply in report.replies]

    def _answer(self, reply: EnvReply) -> tuple[str, StepOutcome | CallFailure]:
        request = self._calls.pop(reply.call)
        self._begun.discard(reply.call)
        answer = reply.outcome or CallFailure(reply.failure, reply.of_answer)
        if is_final(request.last, answer):
            self._held.pop(request.episode, None)
        return request.episode, answer

    def _replace(self, how: str) -> None:
        """Start another process in place of one that has ended, and decide what becomes of its turns."""
        calls, begun, self._calls, self._begun = self._calls, self._begun, {}, set()
        self._deaths += 1
        why = f"the environments' process {how}"
        if self._deaths > MAX_DEATHS:
            raise RuntimeError(f"{why}; it has ended {self._deaths} times in a row without judging anything")
        logger.warning(f"{why} while it judged {len(begun)} turns; another process takes its place")
        self._process = self._next()
        for number, request in calls.items():
            begins = request.prompt is not None
            if number in begun and (self._alone or (len(begun) == 1 and not begins)):
                self._answers.append((request.episode, CallFailure(why, of_answer=True)))
                self._deaths = 0
            elif number in begun and begins:
                self._suspects.append(request)
            else:
                self._waiting.append(request)
