"""Run the commands of an agent in a folder of this machine, or in a container of an image."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, Self

from typing_extensions import override

from pipeline.environments.environment import AgentAccess, EpisodeFailed
from pipeline.environments.episode_folder import EpisodeFolder
from pipeline.sandbox import linux, processes
from pipeline.sandbox.container import Container, ContainerEndpoint
from pipeline.sandbox.sandbox import Sandbox

CHUNK = 1 << 16
DRAIN_S = 0.5
TASK = ".task.json"
PORT = 8000


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The result of a command."""

    status: int
    output: str  # of stdout


class AgentPlace(Protocol):
    """A place for the commands of one episode, which is removed when the context ends."""

    access: AgentAccess
    """How a command reaches the policy from there."""
    errors: str
    """The text that the latest command has printed to stderr."""

    async def __aenter__(self) -> Self:
        """Make the place."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """End what runs in the place, and remove it."""
        ...

    @abstractmethod
    async def run(self, command: list[str], task: dict[str, Any], variables: dict[str, str], shown: bool = True) -> AgentRun:
        """Run a command to its end, with the task on stdin and, if `shown`, in a file. Raises EpisodeFailed if it floods."""
        ...

    @abstractmethod
    async def read(self, name: str) -> str:
        """Return the text of a file. Raises OSError or ValueError if there is none."""
        ...


class HostFolder(AgentPlace):
    """A new folder of this machine. Commands have this user's rights."""

    playing = 0
    """Episodes that are open in this process."""

    def __init__(self, access: AgentAccess, files: str | None, output_bytes: int) -> None:
        self.access, self._files, self._output_bytes = access, files, output_bytes
        self._printed = _Printed(output_bytes)

    @property
    @override
    def errors(self) -> str:
        return self._printed.stderr.decode(errors="replace")

    @override
    async def __aenter__(self) -> Self:
        HostFolder.playing += 1
        self._made = EpisodeFolder()
        self._folder = Path(self._made.path)
        if self._files:
            shutil.copytree(self._files, self._folder, dirs_exist_ok=True)
        return self

    @override
    async def __aexit__(self, *_: object) -> None:
        HostFolder.playing -= 1
        if not HostFolder.playing:
            _end_descendants()
        self._made.remove()

    @override
    async def read(self, name: str) -> str:
        return (self._folder / name).read_text()

    @override
    async def run(self, command: list[str], task: dict[str, Any], variables: dict[str, str], shown: bool = True) -> AgentRun:
        folder, content = self._folder, json.dumps(task, default=str)
        home = {"HOME": str(folder), "TMPDIR": str(folder)}
        if shown:
            (folder / TASK).write_text(content)
            home["HETSTEP_TASK_FILE"] = str(folder / TASK)
        elif HostFolder.playing == 1:
            _end_descendants()  # what an earlier command has left could read the task
        path = {"PATH": search_path(), "PYTHONPATH": os.pathsep.join(_own_folders())}
        output = self._printed = _Printed(self._output_bytes)
        with tempfile.TemporaryFile() as stdin:
            stdin.write(content.encode())
            stdin.seek(0)
            program = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **home, **path, **variables},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=linux.die_with_parent,
            )
        assert program.stdout and program.stderr
        reading = asyncio.gather(output.read(program.stdout, output.stdout), output.read(program.stderr, output.stderr))
        ended = asyncio.ensure_future(_ended(program.pid))
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()  # it raises if there is too much
            await ended
            await asyncio.wait({reading}, timeout=DRAIN_S)  # a process that the program has left may hold the pipes open
        finally:
            for waiting in (reading, ended):
                waiting.cancel()
            await asyncio.gather(reading, ended, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            status = program.wait()
        return AgentRun(status, output.stdout.decode(errors="replace"))


class ImageContainer(AgentPlace):
    """A container of an image, in which the endpoint is the only address that commands reach."""

    def __init__(self, access: AgentAccess, sandbox: Sandbox, image: str, files: str | None) -> None:
        self.access = AgentAccess(f"http://127.0.0.1:{PORT}", access.key)
        self._socket, self._sandbox, self._image, self._files = access.socket, sandbox, image, files
        self.errors = ""

    @override
    async def __aenter__(self) -> Self:
        self._container: Container = await asyncio.to_thread(
            self._sandbox.open, self._image, ContainerEndpoint(self._socket, PORT)
        )
        if self._files:
            await asyncio.to_thread(self._container.put_folder, self._files, self._container.workdir)
        return self

    @override
    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.to_thread(self._container.close))

    @override
    async def read(self, name: str) -> str:
        path = name if name.startswith("/") else f"{self._container.workdir.rstrip('/')}/{name}"
        return (await asyncio.to_thread(self._container.read_file, path)).decode(errors="replace")

    @override
    async def run(self, command: list[str], task: dict[str, Any], variables: dict[str, str], shown: bool = True) -> AgentRun:
        content = json.dumps(task, default=str).encode()
        if shown:
            await asyncio.to_thread(self._container.write_file, f"/tmp/{TASK}", content)
            variables = {"HETSTEP_TASK_FILE": f"/tmp/{TASK}", **variables}
        ran = await asyncio.to_thread(self._container.run, command, content, None, None, variables)
        self.errors = ran.stderr.decode(errors="replace")
        if ran.ended_by not in ("exit", "closed") and not ran.ended_by.startswith("signal"):
            raise EpisodeFailed(f"the command exceeded a limit of its container: {ran.ended_by}")
        return AgentRun(ran.status, ran.stdout.decode(errors="replace"))


class _Printed:
    """The output of a program, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self.stdout, self.stderr, self._most = bytearray(), bytearray(), most

    async def read(self, pipe: IO[bytes], into: bytearray) -> None:
        """Read a pipe to its end. Raises EpisodeFailed if the program prints too much."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await reader.read(CHUNK):
                into += chunk
                if len(self.stdout) + len(self.stderr) > self._most:
                    raise EpisodeFailed(f"the command printed more than {self._most} bytes (output_bytes)")
        finally:
            transport.close()


async def _ended(pid: int) -> None:
    """Wait until a child has ended."""
    descriptor, ended = os.pidfd_open(pid), asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def find_program(command: list[str]) -> list[str]:
    """Return a command with its files as absolute paths. Raises ValueError if there is no such program."""
    program, *arguments = command
    places = [Path.cwd(), *(Path(place) for place in sys.path if place)]

    def absolute(argument: str) -> str:
        return next((str((place / argument).resolve()) for place in places if (place / argument).is_file()), argument)

    path = shutil.which(program, path=search_path()) or (absolute(program) if os.access(absolute(program), os.X_OK) else None)
    if path is None:
        raise ValueError(f"command: got the program {program}; expected one in PATH, or the path of one")
    return [path, *map(absolute, arguments)]


def _own_folders() -> list[str]:
    """Return the folders that the recipe adds to Python's search path, without the interpreter's own, which may be another."""
    of_python = {os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix)}
    folders = [os.path.realpath(folder) for folder in sys.path if folder and os.path.isdir(folder)]
    return [folder for folder in folders if not any(folder.startswith(f"{place}/lib") for place in of_python)]


def search_path() -> str:
    """Return the variable PATH, with the folder of this interpreter first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _end_descendants() -> None:
    """Kill what an agent has left: this process adopts the orphans of its descendants."""
    while pids := processes.descendants(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
