"""Linux system calls that Python's standard library lacks, and the resource limits that a process inherits."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
from pathlib import Path

from pipeline.sandbox.file_system import USER
from pipeline.sandbox.limits import ResourceLimits

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_THP_DISABLE = 4, 36, 41
NEWNS, NEWUSER, NEWNET = 0x00020000, 0x10000000, 0x40000000  # CLONE_* of linux/sched.h
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # MS_* of mount(2)

MAX_PENDING_SIGNALS = 64
"""Pending signals and timers of a program, at most. The system's limit for a user covers all programs of the user together."""

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: bytes | str | int | object) -> int:
    """Call a function of libc. Strings are encoded like file names. Raises OSError if it returns -1."""
    raw = [os.fsencode(a) if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(_libc, name)(*raw)
    if result == -1:
        number = ctypes.get_errno()
        text = ", ".join(str(a) for a in arguments if isinstance(a, str | int))
        raise OSError(number, f"{name}({text}): {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int | object) -> None:
    """Set a process option, with missing arguments as 0. Raises OSError."""
    call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent's thread ends. A change of user or capabilities undoes it."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def program(name: str) -> str | None:
    """Return the path of a program in PATH, as shutil.which does, which imports more; None if there is none."""
    paths = (f"{folder}/{name}" for folder in os.get_exec_path())
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def place() -> str:
    """Return the ids of this process's namespaces of users and processes: processes of another place cannot be joined."""
    return "-".join(f"{os.stat(f'/proc/self/ns/{kind}').st_ino:x}" for kind in ("user", "pid"))


def outer_user() -> int:
    """Return this process's user id outside of its user namespace: root of one container is not root of another."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        if inside <= os.geteuid() < inside + count:
            return outside + os.geteuid() - inside
    return os.geteuid()


def become_nobody() -> None:
    """Give up the rights of root of the machine, if this process has them."""
    if is_root():
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        prctl(PR_SET_DUMPABLE, 1)  # else its files in /proc are root's


def enter_user_namespace(kinds: int) -> None:
    """Enter a new user namespace as its root, where no other user exists, and new namespaces of other kinds (CLONE_*)."""
    become_nobody()
    user, group = os.geteuid(), os.getegid()
    call("unshare", NEWUSER | kinds)
    prctl(PR_SET_DUMPABLE, 1)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1\n")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1\n")


def make_mounts_private() -> None:
    """Let no mount of this process's mount namespace reach another one."""
    call("mount", "none", "/", None, REC | PRIVATE, None)


def protect_device(path: str, target: str) -> None:
    """Mount a device file on a file, read-only: its content stays writable, its mode does not."""
    call("mount", path, target, None, BIND, None)
    call("mount", "none", target, None, REMOUNT | BIND | RDONLY | NOSUID | NOEXEC, None)


def close_all(kept: set[int]) -> None:
    """Close all descriptors but those in `kept`, and lead the standard ones to /dev/null."""
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        try:
            os.close(descriptor)
        except OSError:
            pass  # that of the listing
    for number in range(3):
        nothing = os.open(os.devnull, os.O_RDWR)
        if nothing != number:
            os.dup2(nothing, number)
            os.close(nothing)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after the machine's start; None if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError):
        return None


def raise_oom_score(score: int) -> None:
    """Raise this process's OOM score to at least `score`.

    Short of memory, the kernel ends the process with the highest score: a program (1000) before its guard (999), and both
    before a rank. A higher score stays: the kernel may refuse to lower it, and some containers begin with 1000.
    """
    score_file = Path("/proc/self/oom_score_adj")
    if int(score_file.read_text()) < score:
        score_file.write_text(str(score))


def is_root() -> bool:
    """Return whether this process is root of the machine, not only of a container's user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def raise_open_files() -> None:
    """Raise the soft limit on open files to the hard limit. The soft limit, often 1024, protects only users of select(2)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def counts_processes_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts per user namespace and not per user, as on Linux 5.14 and later."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(c for c in minor if c.isdigit()))) >= (5, 14)


def resource_limits(limits: ResourceLimits, count_processes: bool, in_container: bool = False) -> dict[int, tuple[int, int]]:
    """Return resource -> (soft, hard) for setrlimit(2). No limit is above this process's own hard limit.

    Containers may reserve any address space, as JavaScript engines do: some 10 GB for each WebAssembly memory.
    """
    seconds = int(-(-limits.cpu_s // 1))
    found = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_DATA: (limits.memory_bytes,) * 2,  # private writable memory
        resource.RLIMIT_AS: (limits.memory_bytes + (1 << 30),) * 2,  # with shared and reserved memory
        resource.RLIMIT_FSIZE: (limits.scratch_bytes,) * 2,
        resource.RLIMIT_NOFILE: (limits.open_files,) * 2,
        resource.RLIMIT_CORE: (1, 1),  # bytes; with 0 the kernel still starts a handler that core_pattern pipes to
        resource.RLIMIT_MEMLOCK: (1 << 16,) * 2,
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (MAX_PENDING_SIGNALS,) * 2,
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_NICE: (0, 0),
    }
    if in_container:
        del found[resource.RLIMIT_AS]
    if count_processes:
        found[resource.RLIMIT_NPROC] = (2 * limits.processes,) * 2  # the guard notices first and can report the cause
    return {number: _within(number, pair) for number, pair in found.items()}


def _within(number: int, pair: tuple[int, int]) -> tuple[int, int]:
    """Return the limits (soft, hard) of a resource, cut to this process's own hard limit. number: the resource's."""
    _, most = resource.getrlimit(number)
    return pair if most == resource.RLIM_INFINITY else (min(pair[0], most), min(pair[1], most))
