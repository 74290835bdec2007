"""Timelines of ranks that never ran: each rank's spans, written by the code that real ranks use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from pipeline.observe.rank_timeline import Event, Writer

BEGAN = 1_700_000_000.0  # unix seconds


def record(
    folder: Path,
    rank: int,
    realm: str,
    events: Iterable[Event],
    engine: int | None = None,
    node: str = "node0",
    began: float = BEGAN,
) -> Path:
    """Write a rank's file in an attempt's folder. events: (begin, end, verb, phase), one after another, and (at, step)."""
    events = list(events)
    last = next(event for event in reversed(events) if len(event) == 4)
    about = {"rank": rank, "realm": realm, "engine": engine, "node": node, "began": began}
    path = folder / "timeline" / f"rank{rank:05d}.jsonl"
    Writer(path, about, lambda: (events, last)).flush()
    return path


def cluster(folder: Path, train: int, generate: int, steps: int, engine_ranks: int = 1, per_node: int = 8) -> None:
    """Write an attempt of this many ranks: rollouts of different lengths, then training, then a refit.

    Step s ends at 10 s + 1.
    """
    draw = random.Random(0)
    rows: list[list[Event]] = [[(0.0, 1.0, "setup", "load")] for _ in range(train + generate)]
    rows[0].append((1.0, 0))
    for step in range(1, steps + 1):
        begin = 10 * step - 9
        decoded = [begin + 4 * draw.betavariate(3, 2) + 0.5 for _ in range(generate // engine_ranks)]
        for rank, row in enumerate(rows):
            if rank < train:
                row += _trained(begin, max(decoded), draw)
            else:
                end = decoded[(rank - train) // engine_ranks]
                row += [(begin, end, "rollout", "decode"), (end, begin + 8.5, "idle", "")]
                row += [(begin + 8.5, begin + 9.8, "receive", "receive"), (begin + 9.8, begin + 10, "idle", "")]
        rows[0].append((begin + 10.0, step))
    for rank, row in enumerate(rows):
        trains = rank < train
        engine = None if trains else (rank - train) // engine_ranks
        node = f"node{rank // per_node}"
        record(folder, rank, "train" if trains else "generate", row, engine, node)
    nodes = {f"node{i}": {"clock_skew_s": 0.0, "clock_error_s": 1e-4} for i in range(-(-len(rows) // per_node))}
    (folder / "nodes.json").write_text(json.dumps({"seconds": 1.0, "nodes": nodes}))


def _trained(begin: float, rolled_out: float, draw: random.Random) -> list[Event]:
    """Write one train rank's step."""
    times = [begin, rolled_out, rolled_out + 0.1, rolled_out + 1 + 0.1 * draw.random(), begin + 8.5, begin + 9.8, begin + 10]
    verbs = ["idle", "load", "forward", "step", "send", "idle"]
    phases = ["", "pack", "forward of the policy", "step of the policy", "round 1 of 1, to all", ""]
    return list(zip(times, times[1:], verbs, phases, strict=False))
