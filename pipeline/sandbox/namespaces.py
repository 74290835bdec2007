"""The sandbox backend with plain user namespaces (user_namespaces(7)), for nodes and containers without bubblewrap.

It forks three processes in a chain:

    first     leaves the guard's user namespace, then the other namespaces, and ends; its child is init
    init      process 1 of a PID namespace: builds the program's root, drops its rights and waits for the program; when init
              ends, the kernel ends all processes of the namespace
    program   process 2, with resource limits and only stdin, stdout and stderr open

Each waits for a byte from the guard on the `go` pipe, which closes when the guard dies; init reports on another pipe. Errors
before the program starts are errors of the sandbox. After that init only waits, so only the program can be the cause of its
end.

If the guard runs as real root, the program is user 65534 outside of the sandbox too. Otherwise it is the guard's user there,
since a user can map only itself. With backend `none` a folder replaces the root, and there are no namespaces.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.sandbox import linux, processes
from pipeline.sandbox.file_system import DEVICES, SCRATCH, USER, FileSystemView, environment
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.seccomp import filter_for

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000  # CLONE_* of linux/sched.h
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # MS_* of mount(2)
KEPT_FLAGS = {"nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
"""Flags that a remount must keep: the kernel refuses to drop them for users that do not own the mount."""
DETACH = 2  # MNT_DETACH of umount(2)
BASE = "/tmp"  # exists on every machine; only a mount point inside the new namespace
READY, STATUS, ERROR = b"R", b"S", b"E"
PROGRAM_SCORE = 1000  # see linux.raise_oom_score; above the guard's


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The program that the guard starts, with its files, view and limits."""

    argv: list[str]
    files: dict[str, bytes]  # by name below the scratch folder
    stdio: tuple[int, int, int]  # all above 2
    view: FileSystemView
    limits: ResourceLimits
    has_proc: bool  # whether the sandbox has a /proc
    folder: str = ""  # the scratch folder, without isolation


@dataclass(frozen=True, slots=True)
class PreparedSandbox:
    """A sandbox that is built and waits to start its program."""

    pid: int  # of its process 1, in the guard's PID namespace
    go: int  # any byte written here starts the program; the sandbox ends if this is closed first
    reports: int  # the guard reads it to its end
    status: Callable[[bytes, bool], int | None]
    """Maps (all bytes read from `reports`, whether it has ended) to the program's exit status, or None while it runs.

    Raises SandboxError if the sandbox failed.
    """


def start(spec: ProgramSpec, isolated: bool = True) -> PreparedSandbox:
    """Build a sandbox around a program and return it before the program starts.

    Raises SandboxError with the call that the kernel refused.
    """
    go_reader, go = os.pipe()
    reports, report = os.pipe()
    first = os.fork()
    if first == 0:
        _child(lambda: _first(spec, go_reader, report, isolated), report, keep=(go_reader, report, *spec.stdio))
    os.close(go_reader)
    os.close(report)
    if isolated:
        _expect(reports, READY)  # it has left the guard's user namespace
        _map_users(first)
        os.write(go, b"1")
        os.waitpid(first, 0)
        children = processes.children(os.getpid())
        if not children:
            _expect(reports, READY)
        (init,) = children
        os.write(go, b"2")
    else:
        init = first
    _expect(reports, READY)
    return PreparedSandbox(init, go, reports, partial(_status, init))


def _expect(reports: int, expected: bytes) -> None:
    received = os.read(reports, 1)
    if received != expected:
        raise SandboxError(
            os.read(reports, 1 << 12).decode(errors="replace") if received == ERROR else "sandbox process ended during setup"
        )


def _status(init: int, report: bytes, ended: bool) -> int | None:
    if report[:1] == ERROR:
        raise SandboxError(report[1:].decode(errors="replace"))
    if len(report) == 5:
        return struct.unpack("<i", report[1:])[0]
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) if ended else None  # the program ended process 1


def _map_users(pid: int) -> None:
    """Map the namespace's users. As real root, map root and nobody to themselves; otherwise map nobody to this user."""
    root = is_root()
    for kind, number in (("uid", os.geteuid()), ("gid", os.getegid())):
        if kind == "gid" and not root:
            Path(f"/proc/{pid}/setgroups").write_text("deny")  # otherwise the kernel refuses to map a group
        lines = f"0 0 1\n{USER} {USER} 1\n" if root else f"{USER} {number} 1\n"
        Path(f"/proc/{pid}/{kind}_map").write_text(lines)


def is_root() -> bool:
    """Return whether this process is root of the machine, not only of a container's user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


# ---- first and init -----------------------------------------------------------------------------------------------------


def _child(work: Callable[[], None], report: int, keep: tuple[int, ...]) -> None:
    """Close all descriptors except `keep`, run `work`, write any error of it to `report`, and exit. For a forked process."""
    try:
        default_signals()
        open_files = sorted({0, *keep})
        for low, high in zip(open_files, [*open_files[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        work()
    except BaseException as error:
        os.write(report, ERROR + str(error).encode())
    finally:
        os._exit(0)


def default_signals() -> None:
    """Remove Python's signal handlers. The kernel sends process 1 only signals that it handles, and no signal may end it."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def _first(spec: ProgramSpec, go: int, report: int, isolated: bool) -> None:
    linux.raise_oom_score(PROGRAM_SCORE)
    if not isolated:
        _init(spec, go, report, isolated)
        return
    linux.die_with_parent()
    linux.call("unshare", NEWUSER)
    os.write(report, READY)
    if not os.read(go, 1):
        return
    linux.call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    if os.fork() == 0:
        _child(lambda: _init(spec, go, report, isolated), report, keep=(go, report, *spec.stdio))


def _init(spec: ProgramSpec, go: int, report: int, isolated: bool) -> None:
    if isolated and not os.read(go, 1):  # the guard writes once it is this process's parent
        return
    linux.die_with_parent()
    if isolated:
        root = os.getuid() == 0
        _build_root(spec)
        linux.call("sethostname", "sandbox", len("sandbox"))
        _become_nobody(root)
    folder = SCRATCH if isolated else spec.folder
    os.chdir(folder)
    for name, content in spec.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    if isolated:
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # keeps the program, which is the same user, from tracing this process
        linux.load_filter(filter_for(platform.machine()))
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # as process 1 is
    os.write(report, READY)
    if not os.read(go, 1):
        return
    program = os.fork()
    if program == 0:
        _program(spec, isolated, folder)
    try:
        while True:  # orphans become children of this process
            pid, status = os.wait()
            if pid == program:
                os.write(report, STATUS + struct.pack("<i", os.waitstatus_to_exitcode(status)))
                return
    finally:
        os._exit(1)  # any failure from here on is caused by the program


def _program(spec: ProgramSpec, isolated: bool, folder: str) -> None:
    try:
        linux.die_with_parent()
        os.setsid()  # no terminal
        for number, descriptor in enumerate(spec.stdio):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 16)
        for number, pair in linux.resource_limits(spec.limits, isolated and linux.counts_processes_by_namespace()).items():
            resource.setrlimit(number, pair)
        variables = environment(spec.view) | ({} if isolated else {"HOME": folder, "TMPDIR": folder})
        os.execve(spec.argv[0], spec.argv, variables)
    except BaseException as error:
        os.write(2, f"{spec.argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


# ---- the program's root -------------------------------------------------------------------------------------------------


def _build_root(spec: ProgramSpec) -> None:
    """Build the program's root as bubblewrap does: from the old root, mounted below a temporary one and detached at the end."""
    sources = {path: os.path.realpath(path) for path in spec.view.mounted}
    _mount("none", "/", flags=REC | PRIVATE)  # keeps all later mounts inside this namespace
    _mount("tmpfs", BASE, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.mkdir(f"{BASE}/new")
    os.mkdir(f"{BASE}/old")
    linux.pivot_root(BASE, f"{BASE}/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.mkdir(f"/new{SCRATCH}")
    limits = spec.limits
    size = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files},mode=700,uid={USER},gid={USER}"
    _mount("tmpfs", f"/new{SCRATCH}", "tmpfs", NOSUID | NODEV, size)  # first, since shown folders may lie below it
    for path, to in spec.view.links:
        os.symlink(to, f"/new{path}")
    for path, source in sources.items():
        _show(f"/old{source}", f"/new{path}", NOSUID | NODEV)
    for path in DEVICES:
        _show(f"/old{path}", f"/new{path}", NOSUID | NOEXEC)
    if spec.has_proc:
        os.mkdir("/new/proc")
        _mount("proc", "/new/proc", "proc", NOSUID | NODEV | NOEXEC | RDONLY)
    os.chdir("/new")
    linux.pivot_root(".", ".")  # the old root now covers the new one
    linux.call("umount2", ".", DETACH)
    os.chdir("/")
    _mount("none", "/", flags=REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    linux.call("mount", source, target, kind or None, flags, options or None)


def _show(source: str, target: str, flags: int) -> None:
    """Mount `source` read-only at `target`, with all mounts below it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, flags=BIND | REC)
    for line in Path("/old/proc/self/mountinfo").read_text().splitlines():
        mount_point, options = line.split()[4:6]
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount_point)  # a space is written as \040
        if mount_point == target or mount_point.startswith(f"{target}/"):
            kept = sum(flag for name, flag in KEPT_FLAGS.items() if name in options.split(","))
            _mount("none", mount_point, flags=REMOUNT | BIND | RDONLY | flags | kept)


def _become_nobody(root: bool) -> None:
    """Become user `nobody` without capabilities. root: whether this process is root; if not, it is `nobody` already."""
    linux.drop_capability_bounds()
    if root:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    linux.drop_capabilities()
    linux.die_with_parent()  # again, since a change of user undoes it
