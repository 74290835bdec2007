"""Measure what trackers, and their faults, cost a run: `python -m tests.benchmarks.tracker_faults [rounds]`.

This process stands for rank 0: a step multiplies matrices for a while and writes its line of metrics.jsonl. Blocks of steps
take turns, each beside a tracker in another state: none, one that takes steps, an endpoint that hangs or answers 500, a process
that is killed every second, and a full disk below the trackers' files. So all states meet whatever else runs on the machine.
Printed are wall seconds and this process's CPU seconds of a step, each the lowest tenth of the steps, which met the least of
others' work, beside those without a tracker, and whether all steps had arrived once at the end.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from pipeline.tracking.position import run_id
from pipeline.tracking.supervision import TrackerProcess
from tests.storage.disks import Disk
from tests.tracking.endpoint import Endpoint, serving
from tests.tracking.runs import ROOT, Writer, ask, command, made

STATES = ("none", "takes steps", "hangs", "answers 500", "killed", "disk full")
STEPS = 20
SIZE, PRODUCTS = 640, 12


class MeasuredRun:
    """A run folder beside a tracker in one state, and the seconds of its steps."""

    def __init__(self, state: str, folder: Path, endpoint: Endpoint):
        self.state, self.endpoint = state, endpoint
        self.folder = made(folder)
        self.disk = Disk(self.folder / "tracking") if state == "disk full" else None
        if self.disk:
            self.disk.path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(self.disk.path)], check=True)
        ask(self.folder, endpoint.address)
        run_id(self.folder)
        self.writer = Writer(self.folder)
        self.last = 0
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def block(self) -> None:
        """Run STEPS steps beside the tracker's process, which has started before."""
        self.endpoint.fault = {"hangs": "hang", "answers 500": "500"}.get(self.state, "")
        self.endpoint.pids.clear()
        if self.disk:
            self.disk.fill()
        process = None
        if self.state != "none":
            process = TrackerProcess(command("tests.tracking.endpoint", self.folder), self.folder, self.folder / "attempts/1-0")
            time.sleep(4.0)  # it starts
        over = threading.Event()
        killer = threading.Thread(target=self._kill, args=(over,))
        killer.start()
        for _ in range(STEPS):
            self._step()
        over.set()
        killer.join()
        if self.disk:
            self.disk.free()
        self.endpoint.fault = ""
        self.endpoint.go_on.set()
        if process:
            process.stop(60)
        self.endpoint.go_on.clear()

    def _step(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        matrix = torch.full((SIZE, SIZE), 1.0 / SIZE)
        for _ in range(PRODUCTS):
            matrix = matrix @ matrix
        self.last += 1
        self.writer.steps(self.last)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def _kill(self, over: threading.Event) -> None:
        while self.state == "killed" and not over.wait(1.0):
            if self.endpoint.pids:
                try:
                    os.kill(self.endpoint.pids[-1], signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def caught_up(self) -> bool:
        """Return whether each step has arrived once."""
        arrived = [step for step, *_ in self.endpoint.steps[run_id(self.folder)]]
        return arrived == list(range(1, self.last + 1))

    def close(self) -> None:
        """Remove the disk."""
        if self.disk:
            subprocess.run(["umount", "--lazy", str(self.disk.path)], check=True)


def _lowest_tenth(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10)[0]


def main(rounds: int) -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["TEST_POLL_S"] = "1.0"  # the process's own
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, serving() as endpoint:
        runs = []
        for state in STATES:
            runs.append(MeasuredRun(state, Path(folder) / state.replace(" ", "_"), endpoint))
        for _ in range(rounds):
            for run in runs:
                run.block()
        base = runs[0]
        print(f"{rounds * STEPS} steps each; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{'tracker':<14}{'wall ms':>9}{'of none':>9}{'CPU ms':>9}{'of none':>9}  all steps once")
        for run in runs:
            wall, cpu = _lowest_tenth(run.wall), _lowest_tenth(run.cpu)
            against = wall / _lowest_tenth(base.wall), cpu / _lowest_tenth(base.cpu)
            arrived = "" if run is base else "yes" if run.caught_up() else "NO"
            print(f"{run.state:<14}{1e3 * wall:>9.1f}{against[0]:>9.3f}{1e3 * cpu:>9.1f}{against[1]:>9.3f}  {arrived}")
            run.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 3)
