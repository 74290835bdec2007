"""A rank's connection to a guard: starts a guard for a program and reads the program's result."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from pipeline.sandbox.bubblewrap import Isolation
from pipeline.sandbox.limits import GuardError, ProgramResult, ResourceLimits, SandboxError

ROOT = str(Path(__file__).parents[2])
MAIN = f"import sys; sys.path.insert(0, {ROOT!r}); from pipeline.sandbox import guard; guard.main()"
CHUNK = 1 << 16
GUARD_TIMEOUT_S = 60.0
"""Time for a guard to start and to end, on a node that is very busy."""


class GuardProcess(Protocol):
    """The part of a guard's process that callers use: of a subprocess.Popen or of one that another process has forked."""

    pid: int
    stdin: IO[bytes] | None
    returncode: int | Any

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write to the process's stdin, close it, and return what it wrote to stdout and stderr until its end."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


StartGuard = Callable[[tuple[int, ...]], tuple[GuardProcess, list[int]]]
"""Starts a guard that inherits descriptors of this process. Returns it, and the numbers of the descriptors there."""


def start_guard(inherited: tuple[int, ...]) -> tuple[GuardProcess, list[int]]:
    """Start a guard as a child of this process."""
    libraries = {name: value for name in ("LD_LIBRARY_PATH",) if (value := os.environ.get(name))}  # of the interpreter
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", MAIN, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if inherited else subprocess.PIPE,  # nobody reads that of an interactive program
        env={"PATH": os.defpath, "LANG": "C.UTF-8"} | libraries,
        pass_fds=inherited,
        start_new_session=True,  # signals of a terminal or a batch system to the ranks do not reach it
    )
    return process, list(inherited)


def run(
    isolation: Isolation,
    limits: ResourceLimits,
    argv: list[str],
    files: dict[str, bytes],
    stdin: bytes,
    start: StartGuard | None = None,
    container: int | None = None,
) -> ProgramResult:
    """Run a program to its end. Raises SandboxError if the guard fails, but never because of the program's behaviour.

    container: a descriptor of the process that keeps the root of the program's container; None: it has a scratch folder.
    """
    timeout_s = limits.wall_s + GUARD_TIMEOUT_S
    with _start_errors():
        process, numbers = (start or start_guard)(() if container is None else (container,))
        begun = time.monotonic()
    request = _request(isolation, limits, argv, files, stdin, [], numbers[0] if numbers else None)
    try:
        out, err = process.communicate(request, timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SandboxError(f"sandbox: the guard did not answer within {timeout_s:g} s and was killed") from None
    line, _, rest = out.partition(b"\n")
    if not isolation.bubblewrap and process.returncode < 0:  # without isolation a program can kill its guard
        return ProgramResult(process.returncode, b"", b"", f"signal {-process.returncode}", time.monotonic() - begun)
    if process.returncode != 0 or not line:
        last_line = err.decode(errors="replace").strip().splitlines()[-1:]
        status = f"ended with status {process.returncode}; {''.join(last_line)}"
        raise GuardError(f"sandbox: the guard, {sys.executable}, {status}")
    answer = json.loads(line)
    if "error" in answer:
        raise SandboxError(f"sandbox: {answer['error']}")
    cut = answer["outputs"][0]
    return ProgramResult(answer["status"], rest[:cut], rest[cut:], answer["ended_by"], answer["seconds"])


class InteractiveProgram:
    """A program in the sandbox that exchanges bytes with the caller through its stdin and stdout.

    `close` ends the program and waits for its end. Garbage collection, in any thread, ends it without waiting. The end of this
    process ends it too, since its guard notices.
    """

    def __init__(
        self,
        isolation: Isolation,
        limits: ResourceLimits,
        argv: list[str],
        files: dict[str, bytes],
        start: StartGuard | None = None,
        container: int | None = None,
    ) -> None:
        with _start_errors(), contextlib.ExitStack() as guards_ends, contextlib.ExitStack() as own_ends:
            stdin_reader, self._stdin = os.pipe()
            guards_ends.callback(os.close, stdin_reader)
            own_ends.callback(os.close, self._stdin)
            self._stdout, stdout_writer = os.pipe()
            guards_ends.callback(os.close, stdout_writer)
            own_ends.callback(os.close, self._stdout)
            inherited = (stdin_reader, stdout_writer, *(() if container is None else (container,)))
            process, numbers = (start or start_guard)(inherited)
            own_ends.pop_all()  # the guard runs, so this process keeps its ends
        for descriptor in (self._stdin, self._stdout):  # the program can also fill its stdin and read its stdout
            os.set_blocking(descriptor, False)
        assert process.stdin is not None
        self._process, self._control = process, process.stdin
        self.guard = process.pid
        self._finalizer = weakref.finalize(self, _end_later, _ending_guards(), process, (self._stdin, self._stdout))
        self._finalizer.atexit = False
        try:
            self._control.write(_request(isolation, limits, argv, files, b"", numbers[:2], *numbers[2:]))
            self._control.flush()
        except BrokenPipeError:
            self.close()
            raise SandboxError("sandbox: the guard died when it started") from None

    def send(self, content: bytes, deadline: float) -> None:
        """Write to the program's stdin.

        Raises EOFError if the program has ended, and TimeoutError if it does not take the bytes until `deadline`
        (time.monotonic).
        """
        try:
            os.write(self._control.fileno(), b"\n")  # the guard samples the program at once
        except BrokenPipeError:
            raise EOFError("the program has ended") from None
        unsent = memoryview(content)
        while unsent:
            _wait(self._stdin, select.POLLOUT, deadline)
            try:
                unsent = unsent[os.write(self._stdin, unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError("the program has ended") from None

    def receive(self, size: int, deadline: float) -> bytes:
        """Read exactly `size` bytes from the program's stdout. Raises the same errors as `send`."""
        received = bytearray()
        while len(received) < size:
            received += self.receive_some(size - len(received), deadline)
        return bytes(received)

    def receive_some(self, most: int, deadline: float) -> bytes:
        """Read at least one byte and at most `most` from the program's stdout. Raises the same errors as `send`."""
        while True:
            _wait(self._stdout, select.POLLIN, deadline)
            try:
                chunk = os.read(self._stdout, min(CHUNK, most))
            except BlockingIOError:
                continue
            if not chunk:
                raise EOFError("the program has ended")
            return chunk

    def close(self) -> str:
        """End the program, wait until nothing of it is left, and return its `ProgramResult.ended_by`, or "closed".

        Raises SandboxError if the sandbox failed.
        """
        if self._finalizer.detach() is None:
            return "closed"
        _signal_end(self._process, (self._stdin, self._stdout))
        return _wait_for_end(self._process)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll, remaining_s = select.poll(), deadline - time.monotonic()
    poll.register(descriptor, event)
    if remaining_s <= 0 or not poll.poll(1e3 * remaining_s):  # checks the deadline first: some programs are always ready
        raise TimeoutError("the program did not answer in time")


@functools.cache
def _ending_guards() -> queue.SimpleQueue[GuardProcess]:
    """Return the queue of guards that are about to end, and start the thread that waits for them."""
    ending: queue.SimpleQueue[GuardProcess] = queue.SimpleQueue()

    def work() -> None:
        while True:
            with contextlib.suppress(SandboxError):
                _wait_for_end(ending.get())

    threading.Thread(target=work, name="sandbox endings", daemon=True).start()
    return ending


def _end_later(ending: queue.SimpleQueue, process: GuardProcess, descriptors: tuple[int, ...]) -> None:
    """End a guard without waiting. Takes no lock, since the garbage collector may call this anywhere."""
    _signal_end(process, descriptors)
    ending.put(process)


def _signal_end(process: GuardProcess, descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdin = None  # else `communicate` writes to it


def _wait_for_end(process: GuardProcess) -> str:
    try:
        out, _ = process.communicate(timeout=GUARD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    try:
        answer = json.loads(out)
    except ValueError:
        return "signal 9"
    if "error" in answer:
        raise SandboxError(f"sandbox: {answer['error']}")
    return answer["ended_by"]


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Raise SandboxError if the block fails because this process has no memory or descriptors left to start a guard."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"sandbox: the guard process cannot be started: {error}") from error


def _request(
    isolation: Isolation,
    limits: ResourceLimits,
    argv: list[str],
    files: dict[str, bytes],
    stdin: bytes,
    pipes: list[int],
    container: int | None = None,
) -> bytes:
    """Return the guard's input: a line of JSON and the contents of the files and of stdin.

    pipes: the guard's descriptors of an interactive program's stdin and stdout; empty for others. container: see `run`.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == ".":
            raise ValueError(f"files: got '{name}'; expected a plain path below the scratch folder")
    request = {
        "argv": argv,
        "files": {name: len(content) for name, content in files.items()},
        "stdin": len(stdin),
        "pipes": pipes,
        "container": container,
        "limits": asdict(limits),
        **asdict(isolation),
    }
    return json.dumps(request).encode() + b"\n" + b"".join(files.values()) + stdin
