"""Start the process that forks judges, exchange messages with it, and end it, from the engine's rank.

Two threads of the rank read and write the messages, so neither process ever waits for the other to read.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Self

from pipeline.node import python_path
from pipeline.rollout.judges import parent
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.group import CLOSE_S
from pipeline.rollout.judges.judge_process import EnvCommand, frame, how_ended, messages
from pipeline.rollout.judges.parent import EnvReport
from pipeline.rollout.judges.sealed_stream import SealedStream

READ_S = 1.0  # for the last reports of a process that has ended
CLOSING_S = 2 * CLOSE_S + READ_S  # for a process to close its environments


class ParentProcess:
    """A child process of the rank that waits for its settings, then loads environments and forks judges."""

    def __init__(self, pid: int, connection: socket.socket | SealedStream) -> None:
        self.pid, self.connection = pid, connection
        self.status: int | None = None  # once the process has ended
        self.loaded = self._closing = False
        self.reports: queue.SimpleQueue[EnvReport | None] = queue.SimpleQueue()  # None: the last one
        self._unsent: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    @classmethod
    def spawn(cls) -> Self:
        """Start a process that shares nothing with this process. It ends when the calling thread ends."""
        ours, its = socket.socketpair()
        command = [sys.executable, "-P", "-m", parent.__name__, str(its.fileno()), str(os.getpid())]
        its.set_inheritable(True)
        try:
            no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
            pid = os.posix_spawn(sys.executable, command, python_path.with_package(os.environ), file_actions=[no_input])
        finally:
            its.close()
        return cls(pid, ours)

    def begin(self, settings: EnvironmentSettings, wakeup: threading.Event) -> None:
        """Let the process load its environments. wakeup: set at each report."""
        self.send(settings)
        self._reader = threading.Thread(target=self._read, args=[wakeup], name="judges' reports", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="judges' commands", daemon=True).start()

    def send(self, message: EnvCommand | EnvironmentSettings) -> None:
        """Queue a message; does not wait."""
        self._unsent.put(frame(message))

    def _write(self) -> None:
        """Send queued messages, all at once, until an empty one."""
        while content := self._unsent.get():
            parts = [content]
            while not self._unsent.empty():
                parts.append(self._unsent.get())
            try:
                self.connection.sendall(b"".join(parts))
            except OSError:
                return  # the process is gone, as `_read` notices
            if not parts[-1]:
                return

    def _read(self, wakeup: threading.Event) -> None:
        try:
            for report in messages(self.connection.makefile("rb"), EnvReport):
                self.reports.put(report)
                wakeup.set()
        except OSError:
            pass  # the process is gone
        except Exception as error:  # a report that cannot be decoded
            self.reports.put(EnvReport.of(error))
        finally:
            self.reports.put(None)
            wakeup.set()

    def has_ended(self) -> bool:
        """Return whether the process has ended. If so, first wait at most READ_S for its last reports."""
        if self._poll() is None:
            return False
        self._reader.join(READ_S)
        return True

    def end(self) -> str:
        """Kill the process if it runs; return how it ended."""
        if self._poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait(CLOSE_S)
        self._unsent.put(b"")
        self.connection.shutdown(socket.SHUT_RDWR)
        return "does not end" if self.status is None else how_ended(self.status)

    def begin_close(self) -> None:
        """Let the process close its environments, without waiting."""
        if not self._closing:
            self.send(EnvCommand())
        self._closing = True

    def close(self, within_s: float = CLOSING_S) -> None:
        """Let the process close its environments; kill it if it does not end in time. It may have begun already."""
        self.begin_close()
        self.wait(within_s)
        self.end()

    def _poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of the process."""
        deadline = time.monotonic() + timeout_s
        while self._poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)


_early: list[ParentProcess] = []


def fork_early() -> None:
    """Fork a process for the next `JudgePool` of this process, which inherits all imported modules.

    Call it in the main thread before there is another thread, and before anything looks for a GPU.
    """
    ours, its = socket.socketpair()
    rank = os.getpid()
    if pid := os.fork():
        its.close()
        _early.append(ParentProcess(pid, ours))
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


def end_early() -> None:
    """Let the process that `fork_early` has forked end, because no pool needs it."""
    while _early:
        _early.pop().end()


def start() -> ParentProcess:
    """Return a process that waits for its settings: the one that `fork_early` has forked, or a new one."""
    return _early.pop() if _early else ParentProcess.spawn()
