"""Measure how long an episode's container takes to start, and what thousands of them leave behind.

    python -m tests.benchmarks.container_starts [IMAGE] [--at-once N] [--starts N]

A start is a new container and its shell, until the first command's output is here; then both are closed. Without IMAGE, one is
made of this machine's programs and mounted as a squashfs file where mksquashfs is installed. `--at-once` threads start
containers at the same time, `--starts` all together. Printed: p50 and p99 of a start alone and at once, and how many mounts,
processes, descriptors, cgroups and files of the cache there are more than after the first start, when all is closed.

RESULTS
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
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell
from tests.sandbox.images import make_root, squashed

LIMITS = ResourceLimits(wall_s=60.0, memory_bytes=1 << 30, processes=64, scratch_bytes=1 << 28, open_files=256)
ALONE = 50


def start(sandbox: Sandbox, image: str) -> tuple[float, float]:
    """Return (seconds of a start, seconds until the container is gone)."""
    begun = time.monotonic()
    with sandbox.open(image) as container:
        shell = Shell(container, 600.0)
        said = shell.run("echo ready; echo x > /root/x")
        started = time.monotonic()
        assert said.output == "ready\n", said
        shell.close()
    return started - begun, time.monotonic() - begun


def census(cache: Path) -> dict[str, int]:
    """Return what there is of each kind of thing that a container could leave behind."""
    counts = {
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "processes of this program": len(processes.descendants(os.getpid())),
        "processes of bubblewrap": sum(_is_of_bubblewrap(pid) for pid in os.listdir("/proc") if pid.isdigit()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files of the cache": sum(1 for _ in cache.rglob("*")),
    }
    if folder := cgroup.delegated_folder():
        counts["cgroups"] = len(list(folder.glob(f"{cgroup.PROGRAM_PREFIX}*")))
    return counts


def _is_of_bubblewrap(pid: str) -> bool:
    try:
        return b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes()
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
        start(sandbox, image)
        before = census(folder / "cache")
        print("one at a time:", percentiles([start(sandbox, image)[0] for _ in range(ALONE)]), flush=True)
        begun = time.monotonic()
        with ThreadPoolExecutor(asked.at_once) as pool:
            at_once = list(pool.map(lambda _: start(sandbox, image)[0], range(asked.starts)))
        print(f"{asked.at_once} at once:", percentiles(at_once), f"in {time.monotonic() - begun:.0f} s", flush=True)
        after = census(folder / "cache")
        print("left:", ", ".join(f"{after[kind] - before[kind]} {kind}" for kind in before))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
