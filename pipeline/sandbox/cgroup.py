"""A memory cgroup for each program, where a folder of cgroups was handed to this user (cgroups(7), versions 1 and 2).

The kernel counts there what no process's size shows: buffers of sockets and pipes, page tables, mappings, what the kernel keeps
for files. With version 2 it also counts the CPU time of processes that nobody saw.

Handed over means: systemd has marked the folder as delegated, or it is this user's while the one above is not. That one may
write to a folder is not enough: to root every folder is open, and its owner, systemd or Slurm, expects no other hand.

Slurm makes the cgroups of its steps as root and hands none over, so that its jobs have none here unless its administrator does
(`chown` in a prolog). `systemd-run --user --scope -p Delegate=yes` and rootless containers do.

    DELEGATED               version 1: the folder that this process is in
      sandbox-PID           one program; PID is its guard's
    DELEGATED               version 2: only a folder without processes of its own gives memory to those below it
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

RANKS, OF_A_PROGRAM = "ranks", "sandbox-"
ROOM = 64 << 20  # for the kernel, beside the program's memory and its files
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of version 2, of version 1
COUNTS = ("memory.events", "memory.oom_control")  # which have the line oom_kill
PATIENCE_S = 2.0
NONE = (
    "no memory cgroup is delegated to this user, so memory that the kernel keeps for a program, such as buffers of sockets, is"
    " bounded by its open files and processes alone"
)


def settle() -> bool:
    """Whether programs will have cgroups. The first call of all moves what is in this one to RANKS, with version 2."""
    if place() is not None:
        return True
    version, own = _own()
    if version != 2 or not _delegated(own) or "memory" not in (own / "cgroup.controllers").read_text().split():
        return False
    (own / RANKS).mkdir(exist_ok=True)
    until = time.monotonic() + PATIENCE_S
    while True:
        for pid in (own / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (own / RANKS / "cgroup.procs").write_text(pid)
        try:
            (own / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:  # busy: a process was forked there meanwhile
            if time.monotonic() > until:
                raise SandboxError(f"sandbox: {own} is delegated, and does not give memory to cgroups in it: {error}") from None
            continue
        place.cache_clear()
        return place() is not None


@functools.cache
def place() -> Path | None:
    """The folder in which this process may make cgroups with memory; None if there is none."""
    version, own = _own()
    if version == 1 and _delegated(own):
        return own
    if version == 2 and own.name == RANKS and _delegated(own.parent):
        return own.parent if "memory" in (own.parent / "cgroup.subtree_control").read_text().split() else None
    return None


def join(pid: int, limits: ResourceLimits) -> None:
    """Process `pid`, and all that it starts from now on, get a cgroup, where there is a place. For guards; `remove` ends it.

    Raises SandboxError.
    """
    if (folder := place()) is None:
        return
    own = _program(folder)
    try:
        _sweep(folder)
        own.mkdir()
        (limit,) = (own / name for name in LIMITS if (own / name).exists())
        limit.write_text(str(limits.memory_bytes + limits.scratch_bytes + ROOM))
        if (own / "memory.oom.group").exists():
            (own / "memory.oom.group").write_text("1")  # all of it ends together
        (own / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise SandboxError(f"sandbox: its cgroup in {folder}: {error}") from None


def ran_out() -> bool:
    """Whether the kernel has ended a process of this guard's program for its memory."""
    if (folder := place()) is None:
        return False
    (counts,) = (path for name in COUNTS if (path := _program(folder) / name).exists())
    return any(line.startswith("oom_kill ") and int(line.split()[1]) for line in counts.read_text().splitlines())


def cpu_s() -> float:
    """CPU time of all processes that this guard's program has had, in whole ticks; 0 where there is no cgroup of version 2."""
    if (folder := place()) is None or not (counts := _program(folder) / "cpu.stat").exists():
        return 0.0
    used = (int(line.split()[1]) for line in counts.read_text().splitlines() if line.startswith("usage_usec "))
    return next(used, 0) * TICKS_PER_S // 1_000_000 / TICKS_PER_S


def remove() -> None:
    """The cgroup of this guard's program, all of whose processes have ended."""
    if (folder := place()) is None:
        return
    until = time.monotonic() + PATIENCE_S
    while (own := _program(folder)).exists():
        try:
            own.rmdir()
        except OSError:  # the last of them is not quite gone
            if time.monotonic() > until:
                raise
            time.sleep(0.001)


def _program(folder: Path) -> Path:
    """The cgroup of this guard's program in `folder`, a `place`."""
    return folder / f"{OF_A_PROGRAM}{os.getpid()}"


def _sweep(folder: Path) -> None:
    """Removes what guards that were killed have left."""
    for left in folder.glob(f"{OF_A_PROGRAM}*"):
        if not os.path.exists(f"/proc/{left.name.removeprefix(OF_A_PROGRAM)}"):
            with contextlib.suppress(OSError):
                left.rmdir()


def _own() -> tuple[int, Path]:
    """The version, 0 if there is none, and the folder of the cgroup that counts this process's memory."""
    return own(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())


def own(cgroups: str, mounts: str) -> tuple[int, Path]:
    """As `_own`, of the texts of /proc/PID/cgroup and /proc/PID/mountinfo."""
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


def _delegated(folder: Path) -> bool:
    for mark in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(folder, mark) == b"1":
                return True
    try:
        mine = folder.stat().st_uid == os.geteuid() != folder.parent.stat().st_uid
    except OSError:
        return False
    return mine and os.access(folder / "cgroup.procs", os.W_OK)
