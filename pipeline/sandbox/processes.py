"""Measure the CPU time and memory of a tree of processes from /proc.

A sample is not atomic: processes come and go between two reads, and a process that does so is missing from that sample.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MEMORY = ("RssAnon", "RssShmem", "VmSwap", "VmPTE")  # of proc(5), /proc/PID/status
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of all descendants of a process, without the process itself."""

    processes: int  # threads included
    memory_bytes: int  # private and shared memory, swapped or not, and page tables; shared memory counts once per process
    cpu_s: float  # includes ended processes that were sampled or that their parent waited for


class UsageMeter:
    """Samples the resource usage of the descendants of a process. root: its id.

    When a process ends, the kernel adds its CPU time to that of its parent once the parent waits for it. If the parent ignores
    SIGCHLD, that time is lost, and the last sample of the process counts instead. A process that nobody waits for and that
    lives for less than one interval is not counted here; a cgroup of version 2 counts it (cgroup.py).
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._ticks: dict[tuple[int, int], tuple[int, int]] = {}  # of the last sample, see _ticks
        self._lost = 0  # ticks of ended processes that the sample after the next one found at no parent
        self._pending = 0  # likewise for the last sample: a parent may have been read before it received them

    def sample(self) -> ResourceUsage:
        """Return the current usage. Processes that have ended add only their CPU time.

        Reads parents before children. So the time of a child that ends in between is missing, not counted twice.
        """
        count, memory, ticks = 0, 0, {}
        tree = [self._root, *descendants(self._root)]
        missed = {pid for pid, _ in self._ticks}.difference(tree)  # a list of children may lack some while others end
        for pid in (*tree, *(pid for pid, _ in self._ticks if pid in missed)):
            if (found := _ticks(pid)) is None or (pid in missed and found[0] not in self._ticks):
                continue
            process, (own_ticks, waited_for) = found
            ticks[process] = (own_ticks if pid != self._root else 0, waited_for)
            if pid == self._root or (status := _read(f"/proc/{pid}/status")) is None:
                continue
            lines = status.split("\n")  # a process name may contain \r, \v or \f
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            count += int(values.get("Threads", 1))
            memory += sum(int(values[name].split()[0]) for name in MEMORY if name in values) << 10
        ended = sum(sum(self._ticks[process]) for process in self._ticks.keys() - ticks)
        received = sum(ticks[process][1] - self._ticks[process][1] for process in self._ticks.keys() & ticks)
        self._lost += max(0, self._pending - received)
        self._pending = max(0, ended - max(0, received - self._pending))
        self._ticks = ticks
        return ResourceUsage(count, memory, (sum(map(sum, ticks.values())) + self._lost + self._pending) / TICKS_PER_S)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; empty if the process does not exist."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between two steps of the path
        return []
    return [int(child) for thread in threads for child in (_read(f"/proc/{pid}/task/{thread}/children") or "").split()]


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, of their children, and so on."""
    pids, at = children(pid), 0
    while at < len(pids):
        pids += children(pids[at])
        at += 1
    return pids


def _ticks(pid: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return ((id, start time), (clock ticks of the process, clock ticks of children that it waited for)).

    No two processes share id and start time. Return None for a process that does not exist. See proc(5), /proc/PID/stat.
    """
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    utime, stime, cutime, cstime = map(int, fields[11:15])
    return (pid, int(fields[19])), (utime + stime, cutime + cstime)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_bytes().decode(errors="replace")  # in text mode \r would end a line
    except (FileNotFoundError, ProcessLookupError):
        return None
