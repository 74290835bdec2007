"""Read the host: a rank's process and its descendants, and its node's memory, CPU, disk and NICs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from pipeline.monitor.readings import GB, Sample
from pipeline.node.memory_kills import SYSTEM_FILES, memory_cgroups

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
NO_LIMIT = 1 << 60
"""If a group has no limit, its limit in cgroup v1 is at least this number."""


class HostReader:
    """Reads the process of a rank. On the first rank of a component on a node it reads the node, too."""

    def __init__(self, run_dir: Path, reads_node: bool, pid: int | None = None):
        """Prepare to read. reads_node: whether to read the node too. pid: the rank's process; None: this process."""
        self._pid = os.getpid() if pid is None else pid
        self._run_dir = run_dir
        self._nics = NICBytes() if reads_node else None
        self._ended_s = 0.0  # CPU seconds of descendants that have ended
        self._children_s: dict[int, float] = {}

    def read(self) -> Sample:
        """Return the readings."""
        own_bytes, own_s = _process(self._pid)
        children_bytes, seconds = 0.0, {}
        for pid in descendants(self._pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                size, seconds[pid] = _process(pid)
                children_bytes += size
        self._ended_s += sum(spent for pid, spent in self._children_s.items() if pid not in seconds)
        self._children_s = seconds
        readings = {
            "rss_gb": own_bytes / GB,
            "children_gb": children_bytes / GB,
            "cpu": own_s + self._ended_s + sum(seconds.values()),
        }
        return readings | self._read_node() if self._nics else readings

    def _read_node(self) -> Sample:
        assert self._nics
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
        if bounded := cgroup_memory():
            limit, used = bounded
            total, free = min(total, limit), max(0, min(free, limit - used))
        disk = psutil.disk_usage(str(self._run_dir))
        busy = psutil.cpu_times()
        cores = psutil.cpu_count() or 1
        return {
            "node_memory": 1 - free / total,
            "node_memory_free_gb": free / GB,
            "node_cpu": (busy.user + busy.nice + busy.system + busy.irq + busy.softirq) / cores,
            "disk": disk.used / max(1, disk.used + disk.free),
            "disk_free_gb": disk.free / GB,
            "nic_gb_per_s": self._nics.read() / GB,
        }


def _process(pid: int) -> tuple[int, float]:
    """Return (bytes of host memory, CPU seconds) of a process. Raises OSError if it has ended."""
    shared = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return shared, (int(fields[11]) + int(fields[12])) / TICKS


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process: its children, their children, and so on.

    Reads only the /proc entries of these processes, because a node may have thousands of processes.
    """
    pids, pending = [], [pid]
    while pending:
        tasks = Path(f"/proc/{pending.pop()}/task")
        with contextlib.suppress(OSError):
            for task in os.listdir(tasks):
                with contextlib.suppress(OSError):
                    children = [int(child) for child in (tasks / task / "children").read_bytes().split()]
                    pids += children
                    pending += children
    return pids


def cgroup_memory(root: Path = SYSTEM_FILES) -> tuple[int, int] | None:
    """Return (limit, use) in bytes of the tightest cgroup around this process; None if no cgroup has a limit.

    The use does not count file caches that the kernel can drop.
    """
    bounds = []
    for folder, limit, use in _limits(root):
        with contextlib.suppress(OSError, ValueError):  # a limit of `max` is no number
            bound, used = int((folder / limit).read_text()), int((folder / use).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if bound < NO_LIMIT:
                bounds.append((bound, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))))
    return min(bounds, key=lambda pair: pair[0] - pair[1], default=None)


def _limits(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, file of the limit, file of the use) of this process's cgroup and its parents, for cgroup v1 and v2."""
    with contextlib.suppress(OSError):
        for folders, is_first_version in memory_cgroups(root):
            limit, use = ("limit_in_bytes", "usage_in_bytes") if is_first_version else ("max", "current")
            yield from ((folder, f"memory.{limit}", f"memory.{use}") for folder in folders)


# ---- network cards --------------------------------------------------------------------------------------------------------


WORD = 4
"""Bytes of a unit of InfiniBand's data counters (InfiniBand Architecture Specification, PortXmitData)."""
SYSTEM = Path("/sys/class")


class NICBytes:
    """Reads the byte counters of a node's NICs. RoCE traffic is counted only at the port of its InfiniBand device."""

    def __init__(self, system: Path = SYSTEM):
        """Find the counters. system: the folder in which the kernel describes devices."""
        self._counters: list[tuple[Path, int]] = []  # (file, bytes of a unit)
        ports = sorted(system.glob("infiniband/*/ports/*/counters"))
        self._counters += [(port / f"port_{way}_data", WORD) for port in ports for way in ("xmit", "rcv")]
        with_ports = {net.name for net in system.glob("infiniband/*/device/net/*")}
        for interface in sorted(system.glob("net/*")):
            if (interface / "device").exists() and interface.name not in with_ports:  # loopback, bridges and veth have none
                self._counters += [(interface / "statistics" / f"{way}_bytes", 1) for way in ("tx", "rx")]

    def read(self) -> int:
        """Return the bytes sent and received so far. Counters that no longer exist are skipped."""
        total = 0
        for path, unit in self._counters:
            try:
                total += unit * int(path.read_text())
            except (OSError, ValueError):
                continue
        return total
