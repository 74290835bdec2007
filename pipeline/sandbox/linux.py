"""Linux system calls that Python's standard library lacks, and the resource limits that a process inherits."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
from pathlib import Path

from pipeline.sandbox.limits import ResourceLimits

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
PR_SET_CHILD_SUBREAPER, PR_SET_THP_DISABLE = 36, 41

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


def resource_limits(limits: ResourceLimits, count_processes: bool) -> dict[int, tuple[int, int]]:
    """Return resource -> (soft, hard) for setrlimit(2). No limit is above this process's own hard limit."""
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
    if count_processes:
        found[resource.RLIMIT_NPROC] = (2 * limits.processes,) * 2  # the guard notices first and can report the cause
    return {number: _within(number, pair) for number, pair in found.items()}


def _within(number: int, pair: tuple[int, int]) -> tuple[int, int]:
    """Return the limits (soft, hard) of a resource, cut to this process's own hard limit. number: the resource's."""
    _, most = resource.getrlimit(number)
    return pair if most == resource.RLIM_INFINITY else (min(pair[0], most), min(pair[1], most))
