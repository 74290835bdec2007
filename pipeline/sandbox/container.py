"""Containers: a throw-away root file system for one episode, made from an image, in which programs run one after another.

    with sandbox.open("/shared/images/task.sqsh") as container:
        ran = container.run(["pytest", "-q"], cwd="/testbed", wall_s=600)
        patch = container.read_file("/testbed/fix.patch", most_bytes=1 << 20)

What a program writes is there for the next one, and gone when the container is closed; the image never changes. Each program
has limits and a process namespace of its own; all programs of a container share its files and its network, which is a loopback
interface and, with an endpoint, one address that leads to a Unix socket of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Self

from pipeline.sandbox import container_root, image_cache
from pipeline.sandbox.bubblewrap import Isolation, container_isolation
from pipeline.sandbox.guard_client import CHUNK, GUARD_TIMEOUT_S, ROOT, InteractiveProgram, run
from pipeline.sandbox.image import ImageError, read_image
from pipeline.sandbox.limits import ProgramResult, ResourceLimits, SandboxError

MAIN = f"import sys; sys.path.insert(0, {ROOT!r}); from pipeline.sandbox import container_server; container_server.main()"
UNPACK_S = 3600.0  # for the first container of an image on a node
FILE_S = 600.0  # to read or write a file
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
SCRIPTS = f'for script in {container_root.SCRIPTS}/*.sh; do . "$script" >&2; done; exec env -0'
OF_SHELL = ("PWD", "OLDPWD", "SHLVL", "PS1", "_")
_of_scripts: dict[tuple[str, str], dict[str, str]] = {}
"""Key and path of an image -> the variables that its scripts set."""
MOST_BYTES, MOST_FILES = 1 << 30, 100_000


@dataclass(frozen=True, slots=True)
class ContainerEndpoint:
    """The only address that a container reaches outside: http://127.0.0.1:PORT leads to a Unix socket of this machine."""

    socket: str  # its path
    port: int = 8000


class Container:
    """A container, which `Sandbox.open` makes. Thread-safe. `close`, and garbage collection, remove it."""

    environment: dict[str, str]
    """Variables of every program: ENVIRONMENT, and those of the image."""
    workdir: str
    """Working folder of programs, of the image."""

    def __init__(self, node: Isolation, limits: ResourceLimits, image: str, endpoint: ContainerEndpoint | None = None) -> None:
        """Make a container. node: the isolation that works on this node. Raises ImageError and SandboxError."""
        self._node, self.limits, self._server = node, limits, _server()
        asked = {
            "role": "root",
            "image": asdict(read := read_image(image)),
            "cache": (cache := image_cache.cache_folder()),
            "scratch_bytes": limits.scratch_bytes,
            "scratch_files": limits.scratch_files,
            "port": endpoint.port if endpoint else None,
        }
        self._root = f"{cache}/{image_cache.CONTAINER}/root"
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server.fork(asked, theirs.fileno())
        self._control.settimeout(UNPACK_S)
        answer, (keeper, *listeners) = self._receive_start()
        self._control.settimeout(FILE_S)
        self._keeper = keeper
        self._end = weakref.finalize(self, _end, self._control, keeper, os.getpid())
        self._end.atexit = False
        self._lock, self._programs = threading.Lock(), weakref.WeakSet[InteractiveProgram]()
        self.environment, self.workdir = {**ENVIRONMENT, **answer["environment"]}, answer["workdir"]
        if endpoint is not None:
            self._server.fork({"role": "forwarder", "socket": endpoint.socket}, listeners[0], keeper)
            os.close(listeners[0])
        if answer["has_scripts"]:
            key = read.key, image
            if key not in _of_scripts:
                _of_scripts[key] = self._run_scripts(image)
            self.environment.update(_of_scripts[key])

    def _receive_start(self) -> tuple[dict[str, Any], list[int]]:
        line, descriptors = b"", []
        try:
            while not line.endswith(b"\n"):
                piece, more, _, _ = socket.recv_fds(self._control, CHUNK, 2)
                for descriptor in more:
                    os.set_inheritable(descriptor, False)
                descriptors += more
                if not piece:
                    raise SandboxError("sandbox: the process that builds a container's root was killed")
                line += piece
            answer = json.loads(line)
            if "error" in answer:
                raise (ImageError if answer["kind"] == "image" else SandboxError)(answer["error"])
        except (OSError, SandboxError) as error:
            self._control.close()
            for descriptor in descriptors:
                os.close(descriptor)
            raise (
                SandboxError(f"sandbox: a container was not ready: {error}") if isinstance(error, OSError) else error
            ) from None
        return answer, descriptors

    def _run_scripts(self, image: str) -> dict[str, str]:
        """Return the variables that Apptainer's scripts in the image set. Raises ImageError if they fail."""
        ran = self.run(["sh", "-c", SCRIPTS], cwd="/")
        if ran.status:
            last_line = (ran.stderr.decode(errors="replace").splitlines() or [ran.ended_by])[-1]
            raise ImageError(f"image: got {image}, whose scripts in {container_root.SCRIPTS} fail: {last_line}")
        pairs = dict(line.split("=", 1) for line in ran.stdout.decode(errors="replace").split("\0") if "=" in line)
        return {name: value for name, value in pairs.items() if name not in OF_SHELL}

    def run(
        self,
        argv: list[str],
        stdin: bytes = b"",
        wall_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        """Run a program to its end, and end all that it has started. Raises SandboxError as `Sandbox.run` does.

        argv: a path or a name in PATH, and arguments. A program or a `cwd` that does not exist gives status 127. cwd: absolute,
        default `workdir`. env: more variables. wall_s: replaces the limit for this program.
        """
        isolation, limits = self._isolation(cwd, env), self._limits(wall_s)
        return run(isolation, limits, argv, {}, stdin, self._server.start_guard, self._keeper)

    def start(
        self,
        argv: list[str],
        wall_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> InteractiveProgram:
        """Start an interactive program. Takes the same arguments as `run`; discards its stderr, of `output_bytes` at most."""
        isolation, limits = self._isolation(cwd, env), self._limits(wall_s)
        program = InteractiveProgram(isolation, limits, argv, {}, self._server.start_guard, self._keeper)
        self._programs.add(program)
        return program

    def write_file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, and make its folder. path: absolute. Raises ValueError if the container refuses, as when it is full."""
        self._ask({"do": "write", "path": _absolute(path), "size": len(content), "mode": mode}, content)

    def read_file(self, path: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return the content of a regular file. Raises ValueError if there is none, or if it is longer."""
        return self._ask({"do": "read", "path": _absolute(path), "most": most_bytes})[1]

    def put_folder(self, folder: str | Path, path: str) -> None:
        """Copy the regular files below a folder of this machine into the container. Raises ValueError as `write_file` does."""
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file() and not file.is_symlink():
                self.write_file(f"{path}/{file.relative_to(folder)}", file.read_bytes(), file.stat().st_mode & 0o777)

    def get_folder(self, path: str, folder: str | Path, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
        """Copy the regular files below `path` of the container into a new folder of this machine. Links are left out.

        Raises ValueError if they have more than `most_bytes` together or are more than `most_files`.
        """
        os.mkdir(folder)
        for name, mode, _ in self._ask({"do": "list", "path": _absolute(path), "most": most_files})[0]["files"]:
            content = self.read_file(f"{path}/{name}", most_bytes)
            most_bytes -= len(content)
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            file.chmod(mode | 0o600)

    def close(self) -> None:
        """End the container's programs, and remove it. Raises SandboxError if the sandbox failed."""
        for program in list(self._programs):
            program.close()
        if self._end.detach() is not None:
            _signal_end(self._control)
            poll = select.poll()
            poll.register(self._keeper, select.POLLIN)
            if not poll.poll(1e3 * GUARD_TIMEOUT_S):
                signal.pidfd_send_signal(self._keeper, signal.SIGKILL)
            os.close(self._keeper)

    def __enter__(self) -> Self:
        """Return the container."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the container."""
        self.close()

    def _ask(self, asked: dict[str, Any], content: bytes = b"") -> tuple[dict[str, Any], bytes]:
        with self._lock:
            try:
                self._control.sendall(json.dumps(asked).encode() + b"\n" + content)
                line = b""
                while not line.endswith(b"\n"):
                    line += self._control.recv(1) if asked["do"] == "read" else self._control.recv(CHUNK)
                    if not line:
                        raise EOFError("it was killed")
                answer, received = json.loads(line), bytearray()
                while len(received) < answer.get("size", 0):
                    received += (piece := self._control.recv(CHUNK))
                    if not piece:
                        raise EOFError("it was killed")
            except (OSError, EOFError) as error:
                _signal_end(self._control)  # what comes next would not be the answer to the next question
                raise SandboxError(f"sandbox: the process that keeps a container's root does not answer: {error}") from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer, bytes(received)

    def _isolation(self, cwd: str | None, env: Mapping[str, str] | None) -> Isolation:
        return container_isolation(self._node, self._root, {**self.environment, **(env or {})}, cwd or self.workdir)

    def _limits(self, wall_s: float | None) -> ResourceLimits:
        return self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"path: got {path}; expected an absolute path of the container")
    return path


def _signal_end(control: socket.socket) -> None:
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy
    control.close()


def _end(control: socket.socket, keeper: int, owner: int) -> None:
    """End a container without waiting, unless this process is a fork of its owner.

    Takes no lock, since the garbage collector may call this anywhere.
    """
    if os.getpid() == owner:
        _signal_end(control)
    os.close(keeper)


# ---- the server --------------------------------------------------------------------------------------------------------------


class _Server:
    """This process's connection to a container server (container_server.py)."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        libraries = {name: value for name in ("LD_LIBRARY_PATH",) if (value := os.environ.get(name))}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", MAIN, str(self.pid), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **libraries},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, asked: dict[str, Any], *descriptors: int) -> tuple[int, list[int]]:
        """Fork a process. Return its id, and the numbers of `descriptors` there. Raises SandboxError."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(asked).encode()], descriptors)
                answer = self._socket.recv(CHUNK)
            except OSError as error:
                raise SandboxError(f"sandbox: the container server has ended: {error}") from None
        if not answer:
            raise SandboxError("sandbox: the container server has ended")
        pid, numbers = json.loads(answer)
        return pid, numbers

    def alive(self) -> bool:
        return self.pid == os.getpid() and self._process.poll() is None

    def start_guard(self, inherited: tuple[int, ...]) -> tuple[_ForkedGuard, list[int]]:
        """Start a guard as a fork of the server."""
        with contextlib.ExitStack() as theirs:
            stdin_reader, stdin = os.pipe()
            theirs.callback(os.close, stdin_reader)
            stdout, stdout_writer = os.pipe()
            theirs.callback(os.close, stdout_writer)
            pid, numbers = self.fork({"role": "guard"}, stdin_reader, stdout_writer, *inherited)
        return _ForkedGuard(pid, os.fdopen(stdin, "wb"), stdout), numbers[2:]


class _ForkedGuard:
    """A guard that the server has forked."""

    returncode = 0

    def __init__(self, pid: int, stdin: IO[bytes], stdout: int) -> None:
        self.pid, self.stdin, self._stdout = pid, stdin, stdout

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write to the guard's stdin, close it, and return (stdout until its end, b"")."""
        seconds = GUARD_TIMEOUT_S if timeout is None else timeout
        deadline = time.monotonic() + seconds
        unsent, received, poll = memoryview(input or b""), bytearray(), select.poll()
        poll.register(self._stdout, select.POLLIN)
        if self.stdin is not None:
            os.set_blocking(self.stdin.fileno(), False)
            poll.register(self.stdin, select.POLLOUT)
        while events := poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            if self.stdin is not None:
                with contextlib.suppress(BlockingIOError):
                    try:
                        unsent = unsent[os.write(self.stdin.fileno(), unsent) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                if not unsent:
                    poll.unregister(self.stdin)
                    self.stdin.close()
                    self.stdin = None
            if self._stdout in dict(events):
                if not (chunk := os.read(self._stdout, CHUNK)):
                    os.close(self._stdout)
                    return bytes(received), b""
                received += chunk
        raise subprocess.TimeoutExpired("guard", seconds)

    def kill(self) -> None:
        """Kill the guard. It has not ended, since its stdout is open."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


_servers: list[_Server] = []
_servers_lock = threading.Lock()


def _server() -> _Server:
    """Return this process's server, and start it if there is none. A fork of a process starts its own."""
    with _servers_lock:
        if not _servers or not _servers[-1].alive():
            try:
                _servers[:] = [_Server()]
            except OSError as error:
                raise SandboxError(f"sandbox: the container server cannot be started: {error}") from error
        return _servers[-1]


def _forget() -> None:
    """Begin anew in a fork, whose parent may hold the lock."""
    global _servers_lock
    _servers_lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
