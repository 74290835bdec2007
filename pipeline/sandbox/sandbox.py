"""The sandbox's interface for the rest of the pipeline."""

from __future__ import annotations

from dataclasses import replace

from pipeline.sandbox import backends, guard_client
from pipeline.sandbox.file_system import python
from pipeline.sandbox.guard_client import InteractiveProgram
from pipeline.sandbox.limits import ProgramResult, ResourceLimits


class Sandbox:
    """Runs programs, each in a new sandbox that is removed when the program ends. Thread-safe.

    backend: auto, bubblewrap, namespaces, or none, which isolates nothing and logs a warning. readable: files and folders that
    programs may read besides Python and the system's libraries. Raises ValueError for another backend, and SandboxError with
    remedies where no backend works.
    """

    python: str = python()
    """Path of the interpreter inside the sandbox."""

    def __init__(self, limits: ResourceLimits, backend: str = "auto", readable: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self._backend, self._view = backends.choose(backend, tuple(readable))

    def run(
        self, argv: list[str], files: dict[str, bytes] | None = None, stdin: bytes = b"", wall_s: float | None = None
    ) -> ProgramResult:
        """Run a program to its end. Raises SandboxError if the sandbox fails, never because of the program's behaviour.

        argv: the program's path and arguments. files: initial contents of its working folder, by relative path. wall_s:
        replaces the limit for this program.
        """
        return guard_client.run(self._backend, self._view, self._limits(wall_s), argv, files or {}, stdin)

    def start(self, argv: list[str], files: dict[str, bytes] | None = None, wall_s: float | None = None) -> InteractiveProgram:
        """Start an interactive program. Takes the same arguments as `run`; discards its stderr."""
        return InteractiveProgram(self._backend, self._view, self._limits(wall_s), argv, files or {})

    def _limits(self, wall_s: float | None) -> ResourceLimits:
        return self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
