"""Measure what a rank's timeline costs: `python -m tests.benchmarks.timeline_cost`.

An engine that steps 50 times a second changes what it does at most 200 times a second. All that the recording then takes of a
CPU is added up: `enter` on the rank's own thread, merging and writing on the other.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pipeline.observe.rank_timeline import FLUSH_S, Timeline, Writer

CHANGES_PER_S = 200
SECONDS = 1000
ABOUT = {"rank": 0, "realm": "generate", "engine": 0, "node": "here"}
DOING = (("rollout", "decode"), ("idle", ""), ("rollout", "decode"), ("rollout", "environment"))


def main() -> None:
    timeline = Timeline(ABOUT, {"generate": (0,)})
    entered = written = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline/rank00000.jsonl"
        writer = Writer(path, ABOUT | {"began": time.time()}, timeline.take)
        for _ in range(int(SECONDS / FLUSH_S)):
            begin = time.process_time()
            for i in range(int(CHANGES_PER_S * FLUSH_S)):
                timeline.enter(*DOING[i % len(DOING)])
            middle = time.process_time()
            writer.flush()
            entered, written = entered + middle - begin, written + time.process_time() - middle
    changes = SECONDS * CHANGES_PER_S
    print(f"enter: {1e6 * entered / changes:.2f} us for each change")
    print(f"merge and write: {1e6 * written / changes:.2f} us for each change, flushed every {FLUSH_S:g} s")
    print(f"of a CPU, at {CHANGES_PER_S} changes a second: {(entered + written) / SECONDS:.3%}")


if __name__ == "__main__":
    main()
