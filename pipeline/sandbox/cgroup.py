"""Give each program a memory cgroup where a cgroup folder is delegated to this user (cgroups(7), versions 1 and 2).

In a cgroup the kernel counts memory that no process's size shows: buffers of sockets and pipes, page tables, mappings, and
kernel data about files. Version 2 also counts the CPU time of processes that the guard never sampled.

A folder counts as delegated if systemd has marked it so, or if this user owns it and does not own its parent. Write access
alone is not enough: root can write everywhere, but systemd or Slurm owns those folders and expects no other writer.

Slurm makes the cgroups of its steps as root and delegates none, so its jobs have none here unless the administrator delegates
them (`chown` in a prolog). `systemd-run --user --scope -p Delegate=yes` and rootless containers delegate.

    DELEGATED               version 1: the folder of this process
      sandbox-PID           one program; PID is its guard's
    DELEGATED               version 2: only a folder without processes of its own can hand memory to its children
      ranks                 all processes that were in DELEGATED
      sandbox-PID
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path

from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.processes import TICKS_PER_S

RANKS, PROGRAM_PREFIX = "ranks", "sandbox-"
KERNEL_BYTES = 64 << 20  # for the kernel, on top of the program's memory and its files
LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # version 2, version 1
EVENT_FILES = ("memory.events", "memory.oom_control")  # both have a line oom_kill
RETRY_S = 2.0
NO_CGROUP = (
    "no memory cgroup is delegated to this user. Only the limits on open files and processes bound a program's memory in"
    " the kernel, such as socket buffers"
)


def prepare() -> bool:
    """Return whether programs will have cgroups. With version 2, the first call moves this cgroup's processes to RANKS.

    Raises SandboxError if a delegated folder does not hand memory to its children.
    """
    if delegated_folder() is not None:
        return True
    version, own_folder = _own()
    if version != 2 or not _is_delegated(own_folder) or "memory" not in (own_folder / "cgroup.controllers").read_text().split():
        return False
    (own_folder / RANKS).mkdir(exist_ok=True)
    until = time.monotonic() + RETRY_S
    while True:
        for pid in (own_folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (own_folder / RANKS / "cgroup.procs").write_text(pid)
        try:
            (own_folder / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:  # busy: a process was forked there in the meantime
            if time.monotonic() > until:
                raise SandboxError(
                    f"sandbox: cannot enable the memory controller for children of the delegated cgroup {own_folder}: {error}"
                ) from None
            continue
        delegated_folder.cache_clear()
        return delegated_folder() is not None


@functools.cache
def delegated_folder() -> Path | None:
    """Return the folder in which this process may make memory cgroups; None if there is none."""
    version, own_folder = _own()
    if version == 1 and _is_delegated(own_folder):
        return own_folder
    if version == 2 and own_folder.name == RANKS and _is_delegated(own_folder.parent):
        return own_folder.parent if "memory" in (own_folder.parent / "cgroup.subtree_control").read_text().split() else None
    return None


def join(pid: int, limits: ResourceLimits) -> None:
    """Move process `pid`, and with it all that it starts, into a cgroup, if a folder is delegated. Called by guards.

    `remove` removes the cgroup. Raises SandboxError.
    """
    if (folder := delegated_folder()) is None:
        return
    program_folder = _program_cgroup(folder)
    try:
        _sweep(folder)
        program_folder.mkdir()
        (limit,) = (program_folder / name for name in LIMIT_FILES if (program_folder / name).exists())
        limit.write_text(str(limits.memory_bytes + limits.scratch_bytes + KERNEL_BYTES))
        if (program_folder / "memory.oom.group").exists():
            (program_folder / "memory.oom.group").write_text("1")  # the kernel ends all of its processes together
        (program_folder / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise SandboxError(f"sandbox: cannot create a cgroup in {folder}: {error}") from None


def ran_out_of_memory() -> bool:
    """Return whether the kernel has killed a process of this guard's program because memory ran out."""
    if (folder := delegated_folder()) is None:
        return False
    (counts,) = (path for name in EVENT_FILES if (path := _program_cgroup(folder) / name).exists())
    return any(line.startswith("oom_kill ") and int(line.split()[1]) for line in counts.read_text().splitlines())


def cpu_s() -> float:
    """Return the CPU seconds of all processes of this guard's program, in whole ticks; 0 without a cgroup of version 2."""
    if (folder := delegated_folder()) is None or not (counts := _program_cgroup(folder) / "cpu.stat").exists():
        return 0.0
    used = (int(line.split()[1]) for line in counts.read_text().splitlines() if line.startswith("usage_usec "))
    return next(used, 0) * TICKS_PER_S // 1_000_000 / TICKS_PER_S


def remove() -> None:
    """Remove the cgroup of this guard's program, whose processes have all ended."""
    if (folder := delegated_folder()) is None:
        return
    until = time.monotonic() + RETRY_S
    while (program_folder := _program_cgroup(folder)).exists():
        try:
            program_folder.rmdir()
        except OSError:  # the last process is not quite gone
            if time.monotonic() > until:
                raise
            time.sleep(0.001)


def _program_cgroup(folder: Path) -> Path:
    """Return the path of the program's cgroup below a delegated one."""
    return folder / f"{PROGRAM_PREFIX}{os.getpid()}"


def _sweep(folder: Path) -> None:
    """Remove the cgroups in `folder` that guards left because they were killed."""
    for leftover in folder.glob(f"{PROGRAM_PREFIX}*"):
        if not os.path.exists(f"/proc/{leftover.name.removeprefix(PROGRAM_PREFIX)}"):
            with contextlib.suppress(OSError):
                leftover.rmdir()


def _own() -> tuple[int, Path]:
    """Return (version, folder) of the cgroup that counts this process's memory. The version is 0 if there is none."""
    return memory_cgroup(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def memory_cgroup(cgroups: str, mounts: str) -> tuple[int, Path]:
    """Return (version, folder) as `_own` does, from the texts of /proc/PID/cgroup and /proc/PID/mountinfo."""
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in cgroups.splitlines())}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")  # see proc(5)
        root, folder = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version, path = 0, None
        if kind == "cgroup" and "memory" in options.split(","):
            version, path = 1, next((path for names, path in groups.items() if "memory" in names.split(",")), None)
        elif kind == "cgroup2" and not any("memory" in names.split(",") for names in groups):
            version, path = 2, groups.get("")
        if path is not None and (path == root or path.startswith(root.rstrip("/") + "/")):
            return version, Path(folder, os.path.relpath(path, root))
    return 0, Path("/")


def _is_delegated(folder: Path) -> bool:
    for mark in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, mark) == b"1":
                return True
    try:
        mine = folder.stat().st_uid == os.geteuid() != folder.parent.stat().st_uid
    except OSError:
        return False
    return mine and os.access(folder / "cgroup.procs", os.W_OK)
