"""Which way of containing a program works on this node: found by running one in each.

bubblewrap comes first, where it is installed: it has been reviewed by many, and some systems allow namespaces to nobody else.
"""

from __future__ import annotations

import functools
import sys

from pipeline.sandbox import cgroup, guard_client
from pipeline.sandbox.file_system import FileSystemView, file_system_view, python
from pipeline.sandbox.guard_client import SandboxBackend
from pipeline.sandbox.library_path import library_folders
from pipeline.sandbox.limits import BACKEND_CHOICES, ISOLATING_BACKENDS, GuardError, ResourceLimits, SandboxError

NEEDS = (
    "install bubblewrap (0.8 or later) on the nodes or in the generate image; or let users make namespaces (sysctl"
    " user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0;"
    " in Docker, --security-opt seccomp=unconfined); or, to run what a model wrote with nothing around it, sandbox: none"
)
UNLINKED = "error while loading shared libraries"
"""What ld.so(8) says of a program whose libraries it does not find."""
LIBRARIES = (
    "The interpreter does not find its libraries there: name their folder in LD_LIBRARY_PATH, in the image or in"
    " cluster.generate.env_vars, or use an interpreter that finds them by itself"
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


def choose(asked: str, readable: tuple[str, ...] = ()) -> tuple[SandboxBackend, FileSystemView]:
    """Raises ValueError for what is not of BACKEND_CHOICES, and SandboxError, with what to do, if it does not work here."""
    if asked not in BACKEND_CHOICES:
        raise ValueError(f"sandbox: '{asked}' is not one of: {', '.join(BACKEND_CHOICES)}")
    if asked == "none":
        line = "sandbox: none: programs that a model wrote run as this user, with nothing but limits around them"
        print(f"WARNING: {line}", file=sys.stderr, flush=True)
        return SandboxBackend("none", True), FileSystemView([], [], library_folders(python()))
    return _first_working(asked, readable)


@functools.cache
def _first_working(asked: str, readable: tuple[str, ...]) -> tuple[SandboxBackend, FileSystemView]:
    shown = file_system_view(readable, library_folders(python()))
    if not cgroup.settle():
        print(f"sandbox: {cgroup.NONE}", file=sys.stderr, flush=True)
    reasons: list[str] = []
    for way in [SandboxBackend(name, proc) for proc in (True, False) for name in ISOLATING_BACKENDS if asked in ("auto", name)]:
        try:
            ran = guard_client.run(way, shown, LIMITS, [python(), "probe.py"], {"probe.py": PROBE}, b"")
        except GuardError:  # no way of containing a program mends that
            raise
        except SandboxError as error:
            reasons.append(str(error))
            continue
        if ran.status == 0 and ran.stdout.strip().isdigit() and int(ran.stdout) < 10:
            return way, shown
        said = (ran.stderr or ran.stdout).decode(errors="replace").strip().splitlines()[-1:]
        reasons.append(f"{way.name}: {''.join(said) or ran.ended_by}")
    needs = LIBRARIES if any(UNLINKED in reason for reason in reasons) else NEEDS
    raise SandboxError(
        f"sandbox: no way to contain a program works on this node ({'; '.join(dict.fromkeys(reasons))}). {needs}"
    )
