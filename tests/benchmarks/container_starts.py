"""Measure how long an episode's container takes to start, and what thousands of them leave behind.

    python -m tests.benchmarks.container_starts [IMAGE] [--at-once N] [--starts N]

A start is a new container and its shell, until the first command's output is here. Without IMAGE, one is made of this machine's
programs and, where mksquashfs is installed, mounted as a squashfs file. `--at-once` containers start at the same time and are
closed when all have started; `--starts` is the number of all. Printed: p50 and p99 of a start alone and at once, and how many
mounts, processes, descriptors, cgroups and files of the cache there are more than after the first start.

On two idle cores, in ms, with `--at-once 32 --starts 128`:

    one at a time       p50 17, p99 19
    32 at once          p50 244, p99 303

`--at-once 8 --starts 10000` left nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.sandbox import cgroup, image_cache, processes
from pipeline.sandbox.container import Container
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell
from tests.sandbox.images import make_root, squashed

LIMITS = ResourceLimits(wall_s=60.0, memory_bytes=1 << 30, processes=64, scratch_bytes=1 << 28, open_files=256)
ALONE = 50


def started(sandbox: Sandbox, image: str) -> tuple[float, Container, Shell]:
    """Return (seconds of a start, its container, its shell)."""
    begun = time.monotonic()
    container = sandbox.open(image)
    shell = Shell(container, 600.0)
    said = shell.run("echo ready; echo x > /root/x")
    assert said.output == "ready\n", said
    return time.monotonic() - begun, container, shell


def starts(sandbox: Sandbox, image: str, count: int, at_once: int) -> list[float]:
    """Return the seconds of `count` starts, `at_once` at the same time; these are open until all of them have started."""
    seconds = []
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(count // at_once):
            batch = list(pool.map(lambda _: started(sandbox, image), range(at_once)))
            for taken, container, shell in batch:
                seconds.append(taken)
                shell.close()
                container.close()
    return seconds


def census(cache: Path) -> dict[str, int]:
    """Return what there is of each kind of thing that a container could leave behind."""
    counts = {
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "processes of this program": len(processes.descendants(os.getpid())),
        "processes elsewhere": sum(_names(pid, cache) for pid in os.listdir("/proc") if pid.isdigit()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files of the cache": sum(1 for _ in cache.rglob("*")),
    }
    if folder := cgroup.delegated_folder():
        counts["cgroups"] = len(list(folder.glob(f"{cgroup.PROGRAM_PREFIX}*")))
    return counts


def _names(pid: str, cache: Path) -> bool:
    """Return whether a process's command names the cache, as bubblewrap's and squashfuse's do."""
    try:
        return os.fsencode(cache) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, {len(seconds)} starts"


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("image", nargs="?")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--starts", type=int, default=320)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="container-starts-"))
    folder.chmod(0o755)
    os.environ[image_cache.VARIABLE] = str(folder / "cache")
    try:
        image = asked.image or str((squashed if shutil.which("mksquashfs") else Path)(make_root(folder / "root")))
        sandbox = Sandbox(LIMITS)
        starts(sandbox, image, 1, 1)
        before = census(folder / "cache")
        print("one at a time:", percentiles(starts(sandbox, image, ALONE, 1)), flush=True)
        print(f"{asked.at_once} at once:", percentiles(starts(sandbox, image, asked.starts, asked.at_once)), flush=True)
        after = census(folder / "cache")
        print("left:", ", ".join(f"{after[kind] - before[kind]} {kind}" for kind in before))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
