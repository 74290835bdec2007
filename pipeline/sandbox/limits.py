"""What a program in the sandbox may use, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

ISOLATING_BACKENDS = ("bubblewrap", "namespaces")
BACKEND_CHOICES = ("auto", *ISOLATING_BACKENDS, "none")
"""What a recipe may ask for: how a program is contained, see backends.py."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, or there is none on this node. Never raised for what the program in it did."""


class GuardError(SandboxError):
    """The guard did not run, or ended before its time; see guard_client.py."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Of all processes of one program together, unless it says otherwise. Raises ValueError for what is not above 0.

    The kernel holds to the hard bounds; the guard looks every 20 ms and ends a program beyond the others. At one that is talked
    to and uses nothing it looks less often, down to every half second, until it is asked something or seen at work.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0  # hard for each process (rounded up to a second), watched for their sum
    memory_bytes: int = 512 << 20  # hard for each process's private memory, watched for their sum
    processes: int = 16  # with threads; hard at twice as many on Linux 5.14 and later
    output_bytes: int = 1 << 20  # of stdout and stderr together; hard
    scratch_bytes: int = 64 << 20  # what all files may hold; hard
    scratch_files: int = 4096  # how many files there may be; hard with plain namespaces, watched with bubblewrap
    open_files: int = 64  # of each process; hard

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{field.name}: {value!r} is not a {'whole ' * whole}number")
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name}: {value} must be above 0")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What came of a program."""

    status: int  # its exit status; -N if signal N ended it
    stdout: bytes  # together with stderr at most `output_bytes`
    stderr: bytes
    ended_by: str  # "exit", "wall time", "cpu time", "memory", "output", "processes", or "signal N" (none of the guard's)
    seconds: float  # of wall time
