"""A shell in a container that lives across an episode's commands: its folder, variables and background jobs persist.

Commands go to the stdin of the image's bash, else of its sh, and run there with an empty stdin of their own. A line with a
number that nobody can guess ends a command's output. Output of background jobs comes with that of the command that runs
meanwhile. A command that exceeds its time is killed with all that it started; a shell that cannot be freed so is replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from pipeline.sandbox import linux, processes
from pipeline.sandbox.container import Container
from pipeline.sandbox.guard_client import CHUNK, InteractiveProgram
from pipeline.sandbox.sandbox import Sandbox

PROGRAMS = (["bash", "--noprofile", "--norc"], ["sh"])
GRACE_S = 1.0  # for a shell to report a command whose processes were killed
START_S = 30.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    output: str  # stdout and stderr, at most `output_bytes`: the beginning and the end of longer ones
    status: int | None  # exit status; None if the command did not end by itself
    ended_by: str  # "exit", "wall time", or "shell" if the shell ended or had to be replaced
    shell_ended_by: str = ""  # how the shell ended, as of ProgramResult; its folder, variables and jobs are lost


class Shell:
    """A shell of a container, or of a sandbox without an image. Not thread-safe.

    The limits of these hold, `output_bytes` for each command. session_s: maximum wall time of a shell, including the time
    between commands. cwd, env: of a container's shell.
    """

    def __init__(
        self, container: Container | Sandbox, session_s: float, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Make a shell without starting it, which the first command does."""
        self._container, self._session_s, self._cwd, self._env = container, session_s, cwd, env
        self._program: InteractiveProgram | None = None

    def run(self, command: str, wall_s: float | None = None) -> CommandResult:
        """Run a command line or a script. wall_s: replaces the container's limit. Raises SandboxError if the sandbox fails."""
        limits = self._container.limits
        output = _BoundedOutput(limits.output_bytes)
        try:
            if self._program is None:
                self._program = self._start()
            guard = self._program.guard
            before = set(_jobs(guard))
            deadline = time.monotonic() + (limits.wall_s if wall_s is None else wall_s)
            status, ended_by = _exchange(self._program, command, output, deadline, lambda: _kill_jobs(guard, before))
            return CommandResult(output.text(), status, ended_by)
        except (TimeoutError, EOFError) as error:
            program, self._program = self._program, None
            if program is None:
                return CommandResult(str(error), None, "shell", "exit")
            ended_by = "wall time" if isinstance(error, TimeoutError) else "shell"
            return CommandResult(output.text(), None, ended_by, program.close())

    def _start(self) -> InteractiveProgram:
        """Start a shell. Raises EOFError if the container has none that works, since a program may have changed it."""
        for argv in PROGRAMS:
            if isinstance(self._container, Container):
                program = self._container.start(argv, self._session_s, self._cwd, self._env)
            else:
                program = self._container.start(argv, wall_s=self._session_s)
            try:
                _exchange(program, "exec 2>&1", _BoundedOutput(1), time.monotonic() + START_S)
                return program
            except (TimeoutError, EOFError):
                program.close()
        raise EOFError("there is no bash or sh that works")

    def __enter__(self) -> Self:
        """Return the shell."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the shell and its jobs."""
        self.close()

    def close(self) -> None:
        """End the shell and its jobs."""
        program, self._program = self._program, None
        if program is not None:
            program.close()


class _BoundedOutput:
    """Keeps the first and the last half of `room` bytes."""

    def __init__(self, room: int) -> None:
        self._half = max(1, room // 2)
        self._first, self._last, self._cut = bytearray(), bytearray(), 0

    def add(self, content: bytes) -> None:
        fits = self._half - len(self._first)
        self._first += content[:fits]
        self._last += content[fits:]
        if (beyond := len(self._last) - self._half) > 0:
            del self._last[:beyond]
            self._cut += beyond

    def text(self) -> str:
        middle = f"\n... ({self._cut} bytes cut) ...\n" if self._cut else ""
        return self._first.decode(errors="replace") + middle + self._last.decode(errors="replace")


def _exchange(
    program: InteractiveProgram, command: str, output: _BoundedOutput, deadline: float, kill: Callable[[], None] | None = None
) -> tuple[int | None, str]:
    """Run a command, and return its status and how it ended. Fills `output`.

    kill: kills the command's processes when its time is over. Raises TimeoutError if the shell then does not go on, and
    EOFError if it ends.
    """
    mark = secrets.token_hex(16)
    text = shlex.quote(command.replace("\0", ""))
    script = f"eval {text} </dev/null\ncommand printf '\\n%s %d\\n' {mark} \"$?\"\n"
    try:
        program.send(script.encode(errors="replace"), deadline)
        return _read(program, mark, output, deadline), "exit"
    except TimeoutError:
        if kill is None:
            raise
        kill()
    _read(program, mark, output, time.monotonic() + GRACE_S)
    return None, "wall time"


def _read(program: InteractiveProgram, mark: str, output: _BoundedOutput, deadline: float) -> int:
    """Add a command's output to `output`, and return its status. Raises TimeoutError, and EOFError if the shell ends."""
    begin, pending = f"\n{mark} ".encode(), b""
    while True:
        try:
            pending += program.receive_some(CHUNK, deadline)
        except (TimeoutError, EOFError):
            output.add(pending)
            raise
        at = pending.find(begin)
        if at >= 0 and (end := pending.find(b"\n", at + len(begin))) >= 0:
            output.add(pending[:at])
            status = pending[at + len(begin) : end]
            return int(status) if status.isdigit() else 255  # a program can find out the number and forge the line
        kept = len(begin) + 8 if at < 0 else len(pending) - at
        output.add(pending[: max(0, len(pending) - kept)])
        pending = pending[max(0, len(pending) - kept) :]


def _jobs(guard: int) -> list[tuple[int, int | None]]:
    """Return (id, start time) of the children of the shell below `guard`, and of what they left to the sandbox's process 1."""
    found: list[int] = []
    for bubblewrap in processes.children(guard):
        for first in processes.children(bubblewrap):
            shell, *orphans = sorted(processes.children(first), key=lambda pid: linux.start_ticks(pid) or 0) or [0]
            found += [*processes.children(shell), *orphans]
    return [(pid, linux.start_ticks(pid)) for pid in found]


def _kill_jobs(guard: int, kept: set[tuple[int, int | None]]) -> None:
    """Kill the shell's jobs that are not in `kept`, and what they have started."""
    for _ in range(10):  # until nothing starts meanwhile
        if not (young := [pid for pid, started in _jobs(guard) if (pid, started) not in kept]):
            return
        for pid in [below for top in young for below in (*processes.descendants(top), top)]:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    if pid in processes.descendants(guard):  # else the id is another process's by now
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                finally:
                    os.close(descriptor)
        time.sleep(0.02)
