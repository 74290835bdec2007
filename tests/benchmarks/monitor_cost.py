"""Measure what the resource monitor costs: `python -m tests.benchmarks.monitor_cost [ranks]`.

A real sampler runs for a while in this process, which has as many threads as a rank has, and its CPU seconds are read by the
clock of its thread. Then rank 0's part of a step is timed with samples of many ranks. No GPU: NVML's calls are not in it.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from pipeline.config.schema import MonitorConfig
from pipeline.monitor.history import History
from pipeline.monitor.host import HostReader
from pipeline.monitor.readings import READINGS
from pipeline.monitor.sampler import LOOK_S, SampleFile, Sampler
from pipeline.monitor.stacks import StackWatch
from pipeline.monitor.steps import StepMonitor

THREADS = 60
"""Threads of a rank with vLLM or torch on a GPU."""
SAMPLES = 200
LOOKS = 20_000
STEPS = 10


def seconds_of_a_sample(folder: Path) -> float:
    """Return the CPU seconds of one sample on the first rank of a node, its file included."""
    sampler = Sampler([HostReader(folder, reads_node=True).read], 5.0, SampleFile(folder / "resources/rank.jsonl", {}, 10.0))
    sampler.sample()
    begun = time.thread_time()
    for _ in range(SAMPLES):
        sampler.sample()
    return (time.thread_time() - begun) / SAMPLES


def seconds_of_a_look() -> float:
    """Return the CPU seconds of one look at a stack."""
    watch = StackWatch()
    begun = time.thread_time()
    for _ in range(LOOKS):
        watch.look(0.1)
    return (time.thread_time() - begun) / LOOKS


def seconds_of_a_step(ranks: int, file: Path) -> float:
    """Return rank 0's CPU seconds after a step of so many ranks, half of which train."""
    half = ranks // 2
    components = {"train": tuple(range(half)), "generate": tuple(range(half, ranks))}
    history = History(
        components, {rank: f"n{rank // 8}" for rank in range(ranks)}, tuple((r,) for r in components["generate"]), 10**6, True
    )
    now = 0.0

    def samples() -> dict[int, bytes]:
        values = dict.fromkeys(READINGS, 0.1 * now) | {f"sum:{name}": 0.1 * now for name in READINGS} | {"preemptions": 0.0}
        return dict.fromkeys(
            range(ranks),
            msgspec.msgpack.encode(values | {"at": now, "count": now, "disk_free_gb": 99.0, "node_memory_free_gb": 99.0}),
        )

    monitor = StepMonitor(history, None, ranks, samples, file)
    spent = 0.0
    for step in range(STEPS):
        now += 5.0
        begun = time.thread_time()
        monitor.step_ended(step + 1, {"throughput/tokens_per_s": 100.0}, None)
        spent += time.thread_time() - begun
    return spent / STEPS


def main(arguments: list[str]) -> None:
    release = threading.Event()
    for _ in range(THREADS):
        threading.Thread(target=release.wait, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        sample, look = seconds_of_a_sample(Path(folder)), seconds_of_a_look()
        period = MonitorConfig().period_s
        print(f"a sample: {1e3 * sample:.2f} ms of a CPU, every {period:g} s")
        print(f"a look at the stack: {1e6 * look:.1f} us, every {LOOK_S:g} s")
        print(f"of a CPU, on each rank: {sample / period + look / LOOK_S:.3%}")
        for ranks in map(int, arguments or ("96", "1024")):
            print(
                f"rank 0 after a step, {ranks} ranks: {1e3 * seconds_of_a_step(ranks, Path(folder) / 'warnings.jsonl'):.1f} ms"
            )
    release.set()


if __name__ == "__main__":
    main(sys.argv[1:])
