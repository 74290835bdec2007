"""The sandbox, as the rest of the pipeline uses it."""

from __future__ import annotations

from dataclasses import replace

from pipeline.sandbox import backends, guard_client
from pipeline.sandbox.file_system import python
from pipeline.sandbox.guard_client import InteractiveProgram
from pipeline.sandbox.limits import ProgramResult, ResourceLimits


class Sandbox:
    """Runs programs, each in a sandbox of its own that is gone when it ends. May be used from many threads at once.

    way: auto, bubblewrap, namespaces; or none, which contains nothing, and is told on the log. readable: files and folders that
    programs may read, besides Python and the system's libraries. Raises ValueError for another way, and SandboxError, saying
    what to do, where a program cannot be contained.
    """

    python: str = python()
    """The interpreter, as programs find it."""

    def __init__(self, limits: ResourceLimits, way: str = "auto", readable: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self._way, self._view = backends.choose(way, tuple(readable))

    def run(
        self, argv: list[str], files: dict[str, bytes] | None = None, stdin: bytes = b"", wall_s: float | None = None
    ) -> ProgramResult:
        """argv: the program's path and arguments. files: what its working folder holds at first, by relative path. wall_s: of
        this one, in place of the limit.

        Raises SandboxError if the sandbox fails, never for what the program does.
        """
        return guard_client.run(self._way, self._view, self._limits(wall_s), argv, files or {}, stdin)

    def start(self, argv: list[str], files: dict[str, bytes] | None = None, wall_s: float | None = None) -> InteractiveProgram:
        """Start a program that is talked to. Arguments as of `run`; its stderr goes nowhere."""
        return InteractiveProgram(self._way, self._view, self._limits(wall_s), argv, files or {})

    def _limits(self, wall_s: float | None) -> ResourceLimits:
        return self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
