"""Measure what group verification adds to a join: `python -m tests.benchmarks.proofs`.

Half of the ranks train, half generate by engines of 4. All are processes of this machine, forked from one that has imported
torch, with the real store. They join by turns with and without proofs; a turn lasts from when all ranks have met until the
slowest has joined, in which it is in three groups: all ranks, the refit's and its realm's or engine's. Printed are medians.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from pipeline.job.world import RankInfo, WorkerGroups, World, join, wait_for_all
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore
from pipeline.store.gloo import GlooAuthenticator

SIZES = (8, 32)
TURNS = 12
ENGINE = 4


def rank_main(address: Address, key: bytes, rank: int, size: int, proven: bool) -> None:
    """Join, and store the duration."""
    half = size // 2
    engines = tuple(tuple(range(first, first + ENGINE)) for first in range(half, size, ENGINE))
    workers = WorkerGroups(tuple(range(half)), tuple(range(half, size)), engines)
    place = RankInfo(rank, size, rank, "here", "127.0.0.1", Path(tempfile.gettempdir()))
    world = World(place, workers, RunStore(address, key, 120))
    if not proven:
        GlooAuthenticator.install = lambda self: None
    wait_for_all(world, 120)
    begun = time.perf_counter()
    join(world)
    world.store.set(f"took/{rank}", str(time.perf_counter() - begun))
    world.store.wait([f"took/{other}" for other in range(size)])
    os._exit(0)


def turn(size: int, proven: bool) -> float:
    """Return the slowest rank's seconds. Raises RuntimeError if a rank fails."""
    key = os.urandom(32)
    process, address = start("127.0.0.1", key)
    ranks = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            try:
                rank_main(address, key, rank, size, proven)
            finally:
                os._exit(1)
        ranks.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in ranks]
    if any(statuses):
        raise RuntimeError(f"ranks ended with {statuses}")
    took = RunStore(address, key, 10).multi_get([f"took/{rank}" for rank in range(size)])
    process.kill()
    process.wait()
    return max(map(float, took))


def main() -> None:
    for size in SIZES:
        took: dict[bool, list[float]] = {True: [], False: []}
        for i in range(TURNS):
            for proven in (i % 2 == 0, i % 2 == 1):  # each comes first equally often
                took[proven].append(turn(size, proven))
        with_, without = statistics.median(took[True]), statistics.median(took[False])
        print(f"{size:3} ranks join in {without:.3f} s, with proofs in {with_:.3f} s: x {with_ / without:.2f}", flush=True)


if __name__ == "__main__":
    main()
