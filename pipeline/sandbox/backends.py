"""Choose a sandbox backend that works on this node, by running a probe in each backend.

bubblewrap comes first where it is installed: many people have reviewed it, and some systems let no other program make
namespaces.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, get_args

from pipeline.sandbox import cgroup, guard_client
from pipeline.sandbox.file_system import FileSystemView, file_system_view, python
from pipeline.sandbox.guard_client import SandboxBackend
from pipeline.sandbox.library_path import library_folders
from pipeline.sandbox.limits import ISOLATING_BACKENDS, GuardError, ResourceLimits, SandboxError

SandboxChoice = Literal["auto", "bubblewrap", "namespaces", "none"]
"""Values of the recipe's key `sandbox`; `choose` resolves auto."""

logger = logging.getLogger(__name__)

REMEDIES = (
    "Try to install bubblewrap (0.8 or later) on the nodes or in the generate image; or let users make namespaces (sysctl"
    " user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0;"
    " in Docker, --security-opt seccomp=unconfined); or sandbox: none, to run the model's programs without isolation"
)
MISSING_LIBRARY = "error while loading shared libraries"
"""Message of ld.so(8) for a program whose libraries it does not find."""
LIBRARY_REMEDIES = (
    "The interpreter does not find its libraries in the sandbox. Try to add their folder to LD_LIBRARY_PATH, in the image or"
    " in cluster.generate.env_vars, or an interpreter that needs no LD_LIBRARY_PATH"
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


def choose(choice: str, readable: tuple[str, ...] = ()) -> tuple[SandboxBackend, FileSystemView]:
    """Return (backend for a SandboxChoice, view of the file system that programs get).

    Raises ValueError for an unknown choice, and SandboxError with remedies if the backend does not work on this node.
    """
    if choice not in get_args(SandboxChoice):
        raise ValueError(f"sandbox: got '{choice}'; expected one of: {', '.join(get_args(SandboxChoice))}")
    if choice == "none":
        logger.warning("sandbox: none: the model's programs run with this user's rights; only resource limits apply to them")
        return SandboxBackend("none", True), FileSystemView([], [], library_folders(python()))
    return _first_working(choice, readable)


@functools.cache
def _first_working(choice: str, readable: tuple[str, ...]) -> tuple[SandboxBackend, FileSystemView]:
    view = file_system_view(readable, library_folders(python()))
    if not cgroup.prepare():
        logger.warning(f"sandbox: {cgroup.NO_CGROUP}")
    reasons: list[str] = []
    names = ISOLATING_BACKENDS if choice == "auto" else (choice,)
    for backend in [SandboxBackend(name, has_proc) for has_proc in (True, False) for name in names]:
        try:
            ran = guard_client.run(backend, view, LIMITS, [python(), "probe.py"], {"probe.py": PROBE}, b"")
        except GuardError:  # no backend mends that
            raise
        except SandboxError as error:
            reasons.append(str(error))
            continue
        if ran.status == 0 and ran.stdout.strip().isdigit() and int(ran.stdout) < 10:
            return backend, view
        last_line = (ran.stderr or ran.stdout).decode(errors="replace").strip().splitlines()[-1:]
        reasons.append(f"{backend.name}: {''.join(last_line) or ran.ended_by}")
    remedies = LIBRARY_REMEDIES if any(MISSING_LIBRARY in reason for reason in reasons) else REMEDIES
    raise SandboxError(f"sandbox: no backend works on this node ({'; '.join(dict.fromkeys(reasons))}). {remedies}")
