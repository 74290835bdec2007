"""The sandbox, as the rest of the pipeline uses it."""

from __future__ import annotations

from dataclasses import replace

from pipeline.sandbox import guarded, ways
from pipeline.sandbox.guarded import Program
from pipeline.sandbox.limits import Limits, Ran
from pipeline.sandbox.view import python


class Sandbox:
    """Runs programs, each in a sandbox of its own that is gone when it ends. May be used from many threads at once.

    way: auto, bubblewrap, namespaces; or none, which contains nothing, and is told on the log. readable: files and folders that
    programs may read, besides Python and the system's libraries. Raises ValueError for another way, and SandboxError, saying
    what to do, where a program cannot be contained.
    """

    python: str = python()
    """The interpreter, as programs find it."""

    def __init__(self, limits: Limits, way: str = "auto", readable: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self._way, self._view = ways.choose(way, tuple(readable))

    def run(
        self, argv: list[str], files: dict[str, bytes] | None = None, stdin: bytes = b"", wall_s: float | None = None
    ) -> Ran:
        """argv: the program's path and arguments. files: what its working folder holds at first, by relative path. wall_s: of
        this one, in place of the limit.

        Raises SandboxError if the sandbox fails, never for what the program does.
        """
        return guarded.run(self._way, self._view, self._limits(wall_s), argv, files or {}, stdin)

    def start(self, argv: list[str], files: dict[str, bytes] | None = None, wall_s: float | None = None) -> Program:
        """Start a program that is talked to. Arguments as of `run`; its stderr goes nowhere."""
        return Program(self._way, self._view, self._limits(wall_s), argv, files or {})

    def _limits(self, wall_s: float | None) -> Limits:
        return self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
