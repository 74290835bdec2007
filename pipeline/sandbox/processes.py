"""What a tree of processes uses, read from /proc.

A look is not a moment: between two files processes come and go, and one that does is left out of that look.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Of the processes below one, that one itself left out."""

    processes: int  # with their threads
    memory_bytes: int  # private and shared memory, also swapped out, not mapped files; what two share counts twice
    cpu_s: float  # also of those that have ended, if they were seen or somebody waited for them


class UsageMeter:
    """What the processes below one use, look by look. `root`: its id.

    The kernel adds the CPU time of a process that ends to its parent's, once that waits for it. If the parent ignores ends, the
    time is gone: then what the last look saw of it counts. What lives for less than a look, and is not waited for, is not seen;
    a cgroup of version 2 counts it (cgroup.py).
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._ticks: dict[tuple[int, int], tuple[int, int]] = {}  # of the last look, see _ticks
        self._gone = 0  # ticks of processes that have ended, and that no other was given by the look after that
        self._late = 0  # likewise, but of the last look: a parent may have been read before it was given them

    def look(self) -> ResourceUsage:
        """What has ended uses nothing but the CPU time that it has used.

        Parents are read before their children: the time of a child that ends meanwhile is missing, and not counted twice.
        """
        count, memory, ticks = 0, 0, {}
        tree = [self._root, *below(self._root)]
        missed = {pid for pid, _ in self._ticks}.difference(tree)  # a list of children may lack some while others end
        for pid in (*tree, *(pid for pid, _ in self._ticks if pid in missed)):
            if (found := _ticks(pid)) is None or (pid in missed and found[0] not in self._ticks):
                continue
            process, (own, waited_for) = found
            ticks[process] = (own if pid != self._root else 0, waited_for)
            if pid == self._root or (status := _read(f"/proc/{pid}/status")) is None:
                continue
            lines = status.split("\n")  # a name may have \r, \v or \f in it
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            count += int(values.get("Threads", 1))
            memory += sum(int(values[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in values) << 10
        ended = sum(sum(self._ticks[process]) for process in self._ticks.keys() - ticks)
        given = sum(ticks[process][1] - self._ticks[process][1] for process in self._ticks.keys() & ticks)
        self._gone += max(0, self._late - given)
        self._late = max(0, ended - max(0, given - self._late))
        self._ticks = ticks
        return ResourceUsage(count, memory, (sum(map(sum, ticks.values())) + self._gone + self._late) / TICKS_PER_S)


def children(pid: int) -> list[int]:
    """Empty for a process that is not there."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between two steps of the path
        return []
    return [int(child) for thread in threads for child in (_read(f"/proc/{pid}/task/{thread}/children") or "").split()]


def below(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    found, at = children(pid), 0
    while at < len(found):
        found += children(found[at])
        at += 1
    return found


def _ticks(pid: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(its id and when it began, which no two processes share; clock ticks of its own, and of those that it waited for)

    From proc(5), /proc/PID/stat; None for a process that is not there.
    """
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    utime, stime, cutime, cstime = map(int, fields[11:15])
    return (pid, int(fields[19])), (utime + stime, cutime + cstime)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_bytes().decode(errors="replace")  # as text, \r would end a line
    except (FileNotFoundError, ProcessLookupError):
        return None
