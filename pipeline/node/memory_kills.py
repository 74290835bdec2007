"""Read whether the kernel has ended processes for lack of memory: the counter `oom_kill` of the cgroups around a process.

    cgroup v2    memory.events         counts a group and all groups below it
    cgroup v1    memory.oom_control    counts a group alone, so the groups below it are read too

The counters are read at the start and at the end, since they may have grown before the start. There is no record of processes
on another node, or in a group that Slurm has removed with the process.
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

SYSTEM_FILES = Path("/")
MOST_GROUPS = 256
"""Maximum number of groups to read in cgroup v1 besides this process's group and its parents."""


class MemoryKills:
    """Counts the processes in the cgroups around this process that the kernel ended for lack of memory since construction."""

    def __init__(self, root: Path = SYSTEM_FILES):
        self._root = root
        self._before = dict(_counts(root))

    def record(self) -> str:
        """Return a text about the processes that the kernel ended since construction, with the counter's file; "" if none."""
        grown = {path: count - self._before.get(path, 0) for path, count in _counts(self._root)}
        grown = {path: count for path, count in grown.items() if count > 0}
        if not grown:
            return ""
        path = max(grown, key=lambda path: (len(path.parts), grown[path]))  # outer groups count those of other jobs too
        what = f"{grown[path]} processes" if grown[path] > 1 else "a process"
        return f"the kernel ended {what} for memory: oom_kill in {path} grew by {grown[path]}"


def memory_cgroups(root: Path = SYSTEM_FILES) -> Iterator[tuple[list[Path], bool]]:
    """Yield (folders of this process's cgroup and its parents, whether they are of cgroup v1) of each hierarchy with memory.

    Raises OSError and ValueError if the system has no cgroups.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.lstrip("/")
            yield [folder for folder in (own, *own.parents) if folder.is_relative_to(top)], bool(controllers)


def _counts(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (file, its oom_kill) of this process's cgroup, its parents and, in cgroup v1, its siblings and children."""
    with contextlib.suppress(OSError, ValueError):
        for around, is_first_version in memory_cgroups(root):
            name, own = "memory.oom_control" if is_first_version else "memory.events", around[0]
            beside = itertools.chain(own.glob(f"*/{name}"), own.parent.glob(f"*/{name}") if len(around) > 1 else ())
            beside = itertools.islice(beside, MOST_GROUPS) if is_first_version else ()
            for file in dict.fromkeys([*(folder / name for folder in around), *beside]):
                with contextlib.suppress(OSError, ValueError):
                    values = dict(each.split() for each in file.read_text().splitlines())
                    yield file, int(values.get("oom_kill", 0))
