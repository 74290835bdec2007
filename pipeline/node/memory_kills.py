"""Read whether the kernel has ended processes for memory: the counter `oom_kill` of the cgroups around a process.

    version 2    memory.events         of a group and all below it
    version 1    memory.oom_control    of a group alone, so those below it are read too

The counters are read twice, since they may have grown before. A process of another node, or of a group that Slurm has removed
with it, leaves no record here. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

SYSTEM_FILES = Path("/")
MOST_GROUPS = 256
"""Groups that are read below the outer ones."""


class MemoryKills:
    """Counts the processes that the kernel has ended for memory around this process since it was made."""

    def __init__(self, root: Path = SYSTEM_FILES):
        self._root = root
        self._before = dict(_counts(root))

    def record(self) -> str:
        """Return what the kernel has recorded since, with the file that says it; "" if nothing."""
        grown = {path: count - self._before.get(path, 0) for path, count in _counts(self._root)}
        grown = {path: count for path, count in grown.items() if count > 0}
        if not grown:
            return ""
        path = max(grown, key=lambda path: (len(path.parts), grown[path]))  # outer groups count those of other jobs too
        what = f"{grown[path]} processes" if grown[path] > 1 else "a process"
        return f"the kernel ended {what} for memory: oom_kill in {path} grew by {grown[path]}"


def _counts(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (file, its oom_kill) of this process's group, of those around it and, in version 1, of those beside and below."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            name = "memory.oom_control" if controllers else "memory.events"
            own = top / path.lstrip("/")
            around = [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
            beside = itertools.chain(own.glob(f"*/{name}"), own.parent.glob(f"*/{name}") if own != top else ())
            beside = itertools.islice(beside, MOST_GROUPS) if controllers else ()
            for file in dict.fromkeys([*(folder / name for folder in around), *beside]):
                with contextlib.suppress(OSError, ValueError):
                    values = dict(each.split() for each in file.read_text().splitlines())
                    yield file, int(values.get("oom_kill", 0))
