"""A shell tool: a shell in a container of an image, which persists from one call of an episode to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import Configurable
from pipeline.environments.python_tool import Folder, SandboxArguments
from pipeline.environments.tool import Tool, ToolError, ToolSession
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING, Float, Positive
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell


@dataclass
class ShellArguments(SandboxArguments):
    """The kwargs of the tool `shell`."""

    image: Folder = MISSING
    """Image of the container, as an absolute path: a squashfs or SIF file, a root file system's folder, or an OCI layout."""
    wall_s: Annotated[Float, Field(gt=0)] = 60.0
    """Maximum wall time, in seconds, of a command."""
    cpu_s: Annotated[Float, Field(gt=0)] = 600.0
    """Maximum CPU time, in seconds, of a shell and all that it starts."""
    memory_bytes: Positive = 2 << 30
    """Maximum memory of a shell and all that it starts, in bytes."""
    processes: Positive = 64
    """Maximum number of processes and threads."""
    output_bytes: Positive = 1 << 16
    """Maximum bytes of a command's stdout and stderr. Of longer ones, the middle is left out."""
    scratch_bytes: Positive = 1 << 30
    """Maximum bytes that an episode writes."""
    scratch_files: Positive = 100_000
    """Maximum number of files that an episode writes."""
    open_files: Positive = 256
    """Maximum number of open files of a process."""
    session_s: Annotated[Float, Field(ge=1, le=1e6)] = 3600.0
    """Maximum time, in seconds, of a shell, including the time between calls."""


class ShellTool(Configurable, Tool):
    """Runs commands in a container of its own for each episode; see pipeline/sandbox/container.py."""

    Arguments = ShellArguments
    parameters: ClassVar = {"command": str}

    @classmethod
    @override
    def check(cls, key: str, arguments: ShellArguments) -> Iterator[Problem]:
        if arguments.sandbox == "none":
            yield Problem(f"{key}.sandbox", "unsupported", "got none; expected auto, since a container needs isolation")
        if arguments.readable:
            yield Problem(f"{key}.readable", "has-no-effect", "has no effect with an image, which is all that a command reads")

    def __init__(self, arguments: ShellArguments) -> None:
        """Open a container once, which unpacks the image if it must. Raises ImageError, and SandboxError with remedies."""
        self._sandbox, self._image, self._session_s = arguments.make_sandbox(), arguments.image, arguments.session_s
        self._sandbox.open(self._image).close()

    def open(self) -> ShellSession:
        """Return a session without starting its container, which the first call does."""
        return ShellSession(self._sandbox, self._image, self._session_s)


class ShellSession(ToolSession):
    """An episode's container and shell. A shell that ends is replaced at the next call; the container's files stay."""

    def __init__(self, sandbox: Sandbox, image: str, session_s: float) -> None:
        self._sandbox, self._image, self._session_s = sandbox, image, session_s
        self._ends = contextlib.ExitStack()
        self._shell: Shell | None = None

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Run a command, and return its output, followed by its exit status if that is not 0.

        Raises ToolError if the command took too long or the shell ended.
        """
        if self._shell is None:
            self._shell = Shell(self._ends.enter_context(self._sandbox.open(self._image)), self._session_s)
        seconds = min(self._sandbox.limits.wall_s, timeout_s)
        result = self._shell.run(arguments["command"], seconds)
        output = result.output + "\n" * bool(result.output and not result.output.endswith("\n"))
        if result.ended_by == "exit":
            return result.output if result.status == 0 else f"{output}[exit status {result.status}]"
        lost = "a new shell begins in the image's folder, with no variables or jobs, and the same files"
        if result.ended_by == "wall time":
            killed = f"the command did not end within {seconds:g} s and was killed"
            raise ToolError(f"{output}[{killed}{f'; {lost}' if result.shell_ended_by else ''}]")
        cause = f" ({result.shell_ended_by})" if result.shell_ended_by not in ("exit", "closed") else ""
        raise ToolError(f"{output}[the shell ended{cause}; {lost}]")

    @override
    def close(self) -> None:
        self._shell = None
        self._ends.close()
