"""The sandbox by plain user namespaces (user_namespaces(7)), for nodes and containers without bubblewrap.

Three processes come of it, each forked from the one before:

    first     leaves the guard's user namespace, then the others, and ends: what it forks is process 1 of a new PID namespace
    init      process 1: builds the program's root, gives up its rights, waits for the program; with it the kernel ends all
    program   process 2, with bounds (setrlimit) and nothing open but stdin, stdout and stderr

Each waits for the guard's word on the `go` pipe, which ends when the guard dies; init reports on another. Until there is a
program, what fails is the sandbox. From then on init only waits, and whatever ends it is the program's doing.

Where the guard is really root, the program is user 65534 outside as well. Else it is the same user outside: a user may map no
other. Uncontained, a folder takes the place of the root, and there are no namespaces.
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
KEPT = {"nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
"""What a mount may not lose: the kernel refuses that to those who do not own it."""
DETACH = 2  # MNT_DETACH of umount(2)
BASE = "/tmp"  # a folder that every machine has; only a mount point, hidden in the new namespace alone
READY, STATUS, ERROR = b"R", b"S", b"E"
PROGRAM_SCORE = 1000  # see linux.offer_to_oom_killer; above the guard's


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What the guard is to start."""

    argv: list[str]
    files: dict[str, bytes]  # by name below the scratch folder
    stdio: tuple[int, int, int]  # all above 2
    view: FileSystemView
    limits: ResourceLimits
    proc: bool  # whether /proc is to be there
    folder: str = ""  # the scratch folder, if uncontained


@dataclass(frozen=True, slots=True)
class PreparedSandbox:
    """A sandbox that is built, and waits."""

    pid: int  # of its process 1, here
    go: int  # anything written there lets it go on; it dies if this is closed before
    reports: int  # to be read until its end
    status: Callable[[bytes, bool], int | None]
    """Of all that was read there, and whether that has ended: the program's status, or None if it has none yet.

    Raises SandboxError if the sandbox failed.
    """


def start(job: ProgramSpec, contained: bool = True) -> PreparedSandbox:
    """Raises SandboxError with what the kernel did not allow."""
    go_reader, go = os.pipe()
    reports, report = os.pipe()
    first = os.fork()
    if first == 0:
        _child(lambda: _first(job, go_reader, report, contained), report, keep=(go_reader, report, *job.stdio))
    os.close(go_reader)
    os.close(report)
    if contained:
        _expect(reports, READY)  # it has left our user namespace
        _map_users(first)
        os.write(go, b"1")
        os.waitpid(first, 0)
        found = processes.children(os.getpid())
        if not found:
            _expect(reports, READY)
        (init,) = found
        os.write(go, b"2")
    else:
        init = first
    _expect(reports, READY)
    return PreparedSandbox(init, go, reports, partial(_status, init))


def _expect(reports: int, what: bytes) -> None:
    told = os.read(reports, 1)
    if told != what:
        raise SandboxError(
            os.read(reports, 1 << 12).decode(errors="replace") if told == ERROR else "it died while it was built"
        )


def _status(init: int, told: bytes, ended: bool) -> int | None:
    if told[:1] == ERROR:
        raise SandboxError(told[1:].decode(errors="replace"))
    if len(told) == 5:
        return struct.unpack("<i", told[1:])[0]
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) if ended else None  # the program has ended process 1


def _map_users(pid: int) -> None:
    """Who the namespace's users are outside: root and nobody themselves if we may say so, else nobody is this user."""
    root = is_root()
    for what, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        if what == "gid" and not root:
            Path(f"/proc/{pid}/setgroups").write_text("deny")  # else no group may be mapped
        lines = f"0 0 1\n{USER} {USER} 1\n" if root else f"{USER} {own} 1\n"
        Path(f"/proc/{pid}/{what}_map").write_text(lines)


def is_root() -> bool:
    """Of the machine, not of a container's user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


# ---- first and init -----------------------------------------------------------------------------------------------------


def _child(work: Callable[[], None], report: int, keep: tuple[int, ...]) -> None:
    """The rest of a forked process's life."""
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
    """Python's own handlers end: process 1 is sent only signals that it handles, and none of the program's may end it."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def _first(job: ProgramSpec, go: int, report: int, contained: bool) -> None:
    linux.offer_to_oom_killer(PROGRAM_SCORE)
    if not contained:
        _init(job, go, report, contained)
        return
    linux.die_with_parent()
    linux.call("unshare", NEWUSER)
    os.write(report, READY)
    if not os.read(go, 1):
        return
    linux.call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    if os.fork() == 0:
        _child(lambda: _init(job, go, report, contained), report, keep=(go, report, *job.stdio))


def _init(job: ProgramSpec, go: int, report: int, contained: bool) -> None:
    if contained and not os.read(go, 1):  # the guard speaks when it is our parent
        return
    linux.die_with_parent()
    if contained:
        root = os.getuid() == 0
        _build_root(job)
        linux.call("sethostname", "sandbox", len("sandbox"))
        _become_nobody(root)
    folder = SCRATCH if contained else job.folder
    os.chdir(folder)
    for name, content in job.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    if contained:
        linux.prctl(linux.PR_SET_DUMPABLE, 0)  # the program, the same user, cannot reach into this process
        linux.load_filter(filter_for(platform.machine()))
    else:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # as process 1 is
    os.write(report, READY)
    if not os.read(go, 1):
        return
    program = os.fork()
    if program == 0:
        _program(job, contained, folder)
    try:
        while True:  # what is orphaned becomes our child
            pid, status = os.wait()
            if pid == program:
                os.write(report, STATUS + struct.pack("<i", os.waitstatus_to_exitcode(status)))
                return
    finally:
        os._exit(1)  # whatever fails from here on is the program's doing


def _program(job: ProgramSpec, contained: bool, folder: str) -> None:
    try:
        linux.die_with_parent()
        os.setsid()  # no terminal
        for number, descriptor in enumerate(job.stdio):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 16)
        for number, pair in linux.bounds(job.limits, contained and linux.counts_processes_by_namespace()).items():
            resource.setrlimit(number, pair)
        own = environment(job.view) | ({} if contained else {"HOME": folder, "TMPDIR": folder})
        os.execve(job.argv[0], job.argv, own)
    except BaseException as error:
        os.write(2, f"{job.argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


# ---- the program's root -------------------------------------------------------------------------------------------------


def _build_root(job: ProgramSpec) -> None:
    """bubblewrap's way: what was the root hangs below a new one while the program's is put together from it, and then goes."""
    sources = {path: os.path.realpath(path) for path in job.view.mounted}
    _mount("none", "/", flags=REC | PRIVATE)  # nothing that follows reaches the machine
    _mount("tmpfs", BASE, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.mkdir(f"{BASE}/new")
    os.mkdir(f"{BASE}/old")
    linux.pivot_root(BASE, f"{BASE}/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.mkdir(f"/new{SCRATCH}")
    limits = job.limits
    size = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files},mode=700,uid={USER},gid={USER}"
    _mount("tmpfs", f"/new{SCRATCH}", "tmpfs", NOSUID | NODEV, size)  # first, as what is to be seen may lie in it
    for path, to in job.view.links:
        os.symlink(to, f"/new{path}")
    for path, source in sources.items():
        _show(f"/old{source}", f"/new{path}", NOSUID | NODEV)
    for path in DEVICES:
        _show(f"/old{path}", f"/new{path}", NOSUID | NOEXEC)
    if job.proc:
        os.mkdir("/new/proc")
        _mount("proc", "/new/proc", "proc", NOSUID | NODEV | NOEXEC | RDONLY)
    os.chdir("/new")
    linux.pivot_root(".", ".")  # the old root now lies over the new one
    linux.call("umount2", ".", DETACH)
    os.chdir("/")
    _mount("none", "/", flags=REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    linux.call("mount", source, target, kind or None, flags, options or None)


def _show(source: str, target: str, flags: int) -> None:
    """`source` read-only at `target`, with all that is mounted in it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, flags=BIND | REC)
    for line in Path("/old/proc/self/mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)  # a space is \\040 there
        if place == target or place.startswith(f"{target}/"):
            kept = sum(flag for name, flag in KEPT.items() if name in options.split(","))
            _mount("none", place, flags=REMOUNT | BIND | RDONLY | flags | kept)


def _become_nobody(root: bool) -> None:
    """`root`: as whom the namespace was entered; else this is nobody already, with all rights over the namespace."""
    linux.bar_capabilities()
    if root:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    linux.drop_capabilities()
    linux.die_with_parent()  # again, for a change of user undoes it
