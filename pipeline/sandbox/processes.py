"""What a tree of processes uses, read from /proc.

A look is not a moment: between two files processes come and go, and one that does is left out of that look.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the processes below one, that one itself left out."""

    processes: int  # with their threads
    memory_bytes: int  # private and shared memory, also swapped out, not mapped files; what two share counts twice
    cpu_s: float  # also of those that have ended, unless their parent ignored their end


def usage(root: int) -> Usage:
    """`root`: a process's id. What has ended uses nothing."""
    count, memory, ticks = 0, 0, sum(_ticks(root)[2:])
    for pid in below(root):
        status = _read(f"/proc/{pid}/status")
        if status is None:
            continue
        values = dict(line.split(":", 1) for line in status.split("\n") if ":" in line)  # a name may have \r, \v or \f in it
        count += int(values.get("Threads", 1))
        memory += sum(int(values[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in values) << 10
        ticks += sum(_ticks(pid))
    return Usage(count, memory, ticks / TICKS_PER_S)


def children(pid: int) -> list[int]:
    """Empty for a process that is not there."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    return [int(child) for thread in threads for child in (_read(f"/proc/{pid}/task/{thread}/children") or "").split()]


def below(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    found, at = children(pid), 0
    while at < len(found):
        found += children(found[at])
        at += 1
    return found


def _ticks(pid: int) -> list[int]:
    """utime, stime, cutime, cstime of proc(5), in clock ticks."""
    stat = _read(f"/proc/{pid}/stat")
    return [int(field) for field in stat.rsplit(")", 1)[1].split()[11:15]] if stat else [0, 0, 0, 0]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_bytes().decode(errors="replace")  # as text, \r would end a line
    except (FileNotFoundError, ProcessLookupError):
        return None
