"""The resources that a program in the sandbox may use, and the result of a program."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


class SandboxError(RuntimeError):
    """Raised if the sandbox failed or does not work on this node. Never raised because of a program's behaviour."""


class GuardError(SandboxError):
    """Raised if the guard did not run or ended too early; see guard_client.py."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits on all processes of one program together, unless a field says otherwise. Raises ValueError for values <= 0.

    The kernel enforces hard limits. The guard samples the others every 20 ms and ends a program that exceeds one. It samples an
    idle interactive program less often, down to every 0.5 s, until the program gets input or uses something.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0  # hard for each process (rounded up to a second), sampled for their sum
    memory_bytes: int = 512 << 20  # hard for each process's private memory, sampled for their sum
    processes: int = 16  # threads included; hard at twice as many on Linux 5.14 and later
    output_bytes: int = 1 << 20  # stdout and stderr together; hard
    scratch_bytes: int = 64 << 20  # contents of all files; hard
    scratch_files: int = 4096  # number of files; sampled
    open_files: int = 64  # per process; hard

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_integer = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float):
                raise ValueError(f"{field.name}: got {value!r}; expected a {'whole ' * is_integer}number")
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}: got {value}; expected a finite number above 0")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program that ended."""

    status: int  # its exit status; -N if signal N ended it
    stdout: bytes  # together with stderr at most `output_bytes`
    stderr: bytes
    ended_by: str  # "exit", "wall time", "cpu time", "memory", "output", "processes", "closed", "signal N" (not by the guard)
    seconds: float  # of wall time
