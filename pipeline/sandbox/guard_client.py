"""A rank's end of a guard: starts one for a program, and reads what came of it.

Left out: which way to take (`backends.py`).
"""

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from pipeline.sandbox.file_system import FileSystemView
from pipeline.sandbox.limits import GuardError, ProgramResult, ResourceLimits, SandboxError

ROOT = str(Path(__file__).parents[2])
MAIN = f"import sys; sys.path.insert(0, {ROOT!r}); from pipeline.sandbox import guard; guard.main()"
KEPT = ("PATH", "LD_LIBRARY_PATH")
"""Of a rank's environment, for its guards: to find bubblewrap and the interpreter's libraries."""
CHUNK = 1 << 16
PATIENCE_S = 60.0
"""For a guard to start and to end, on a node that is very busy."""


@dataclass(frozen=True, slots=True)
class SandboxBackend:
    """How a program is contained on this node."""

    name: str  # bubblewrap, namespaces or none
    proc: bool  # whether /proc is there: some containers do not allow it


def run(
    way: SandboxBackend, view: FileSystemView, limits: ResourceLimits, argv: list[str], files: dict[str, bytes], stdin: bytes
) -> ProgramResult:
    """Raises SandboxError if the guard fails, not for what the program does."""
    with _room():
        process, begun = _start(()), time.monotonic()
    try:
        out, err = process.communicate(_asked(way, view, limits, argv, files, stdin, []), limits.wall_s + PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SandboxError(f"sandbox: its guard said nothing for {limits.wall_s + PATIENCE_S:g} s, and was killed") from None
    line, _, rest = out.partition(b"\n")
    if way.name == "none" and process.returncode < 0:  # nothing keeps the program from that
        return ProgramResult(process.returncode, b"", b"", f"signal {-process.returncode}", time.monotonic() - begun)
    if process.returncode != 0 or not line:
        said = err.decode(errors="replace").strip().splitlines()[-1:]
        raise GuardError(f"sandbox: its guard, {sys.executable}, ended with status {process.returncode}; {''.join(said)}")
    answer = json.loads(line)
    if "error" in answer:
        raise SandboxError(f"sandbox ({way.name}): {answer['error']}")
    cut = answer["outputs"][0]
    return ProgramResult(answer["status"], rest[:cut], rest[cut:], answer["ended_by"], answer["seconds"])


class InteractiveProgram:
    """A program in the sandbox that is talked to through its stdin and stdout.

    It ends with `close`; or when nobody has it, which may be in any thread, so that this does not wait for its end. The end of
    this process ends it too: its guard sees that.
    """

    def __init__(
        self, way: SandboxBackend, view: FileSystemView, limits: ResourceLimits, argv: list[str], files: dict[str, bytes]
    ) -> None:
        with _room(), contextlib.ExitStack() as its, contextlib.ExitStack() as ours:
            its_stdin, self._to = os.pipe()
            its.callback(os.close, its_stdin)
            ours.callback(os.close, self._to)
            self._from, its_stdout = os.pipe()
            its.callback(os.close, its_stdout)
            ours.callback(os.close, self._from)
            process = _start((its_stdin, its_stdout))
            ours.pop_all()  # kept, as the guard is there
        for descriptor in (self._to, self._from):  # the program can fill the one, and read the other before this process
            os.set_blocking(descriptor, False)
        self._process = process
        self._forgotten = weakref.finalize(self, _end_behind, _endings(), process, (self._to, self._from))
        self._forgotten.atexit = False
        try:
            process.stdin.write(_asked(way, view, limits, argv, files, b"", [its_stdin, its_stdout]))
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            raise SandboxError("sandbox: its guard died when it was started") from None

    def send(self, content: bytes, deadline: float) -> None:
        """Raises EOFError if the program is gone, TimeoutError if it has not taken this in by `deadline` (time.monotonic)."""
        try:
            os.write(self._process.stdin.fileno(), b"\n")  # the guard is to look at it
        except BrokenPipeError:
            raise EOFError("the program is gone") from None
        left = memoryview(content)
        while left:
            _wait(self._to, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._to, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError("the program is gone") from None

    def receive(self, size: int, deadline: float) -> bytes:
        """Exactly `size` bytes. Raises as `send`."""
        received = bytearray()
        while len(received) < size:
            _wait(self._from, select.POLLIN, deadline)
            try:
                chunk = os.read(self._from, min(CHUNK, size - len(received)))
            except BlockingIOError:
                continue
            if not chunk:
                raise EOFError("the program is gone")
            received += chunk
        return bytes(received)

    def close(self) -> str:
        """Ends it, and waits until nothing of it is left. What ended it: as `ProgramResult.ended_by`, or "closed".

        Raises SandboxError if the sandbox failed.
        """
        if self._forgotten.detach() is None:
            return "closed"
        _tell_end(self._process, (self._to, self._from))
        return _end(self._process)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll, left = select.poll(), deadline - time.monotonic()
    poll.register(descriptor, event)
    if left <= 0 or not poll.poll(1e3 * left):  # a program that is always ready has no more time than others
        raise TimeoutError("it does not answer")


@functools.cache
def _endings() -> queue.SimpleQueue[subprocess.Popen]:
    """Guards that were told to end. Its thread waits for them, and does nothing else."""
    endings: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()

    def work() -> None:
        while True:
            with contextlib.suppress(SandboxError):
                _end(endings.get())

    threading.Thread(target=work, name="sandbox endings", daemon=True).start()
    return endings


def _end_behind(endings: queue.SimpleQueue, process: subprocess.Popen, descriptors: tuple[int, ...]) -> None:
    """Takes no lock: the collector may call this in the midst of anything."""
    _tell_end(process, descriptors)
    endings.put(process)


def _tell_end(process: subprocess.Popen, descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdin = None  # else `communicate` writes to it


def _end(process: subprocess.Popen) -> str:
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
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
def _room() -> Iterator[None]:
    """Raise SandboxError where this process has no memory or no descriptors left to start a guard."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"sandbox: its guard cannot be started: {error}") from error


def _start(inherited: tuple[int, ...]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", MAIN, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if inherited else subprocess.PIPE,  # nobody reads it of one that is talked to
        env={"PATH": os.defpath, "LANG": "C.UTF-8"} | {name: os.environ[name] for name in KEPT if name in os.environ},
        pass_fds=inherited,
        start_new_session=True,  # what a terminal or a batch system tells the ranks is not for it
    )


def _asked(
    way: SandboxBackend,
    view: FileSystemView,
    limits: ResourceLimits,
    argv: list[str],
    files: dict[str, bytes],
    stdin: bytes,
    talk: list[int],
) -> bytes:
    """The guard's one line, and what follows it."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == ".":
            raise ValueError(f"files: '{name}' is no plain path below the scratch folder")
    asked = {
        "argv": argv,
        "files": {name: len(content) for name, content in files.items()},
        "stdin": len(stdin),
        "talk": talk,
        "view": asdict(view),
        "limits": asdict(limits),
        "way": way.name,
        "proc": way.proc,
    }
    return json.dumps(asked).encode() + b"\n" + b"".join(files.values()) + stdin
