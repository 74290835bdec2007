"""Submit real runs of the tiny model as a user would, and read their folders."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch.runs.attempts import all_attempts, latest
from pipeline.observe.metrics import NOT_REPRODUCIBLE, read
from tests.end_to_end import warm
from tests.fork_server import Program
from tests.launch.waiting import alive

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
RECIPE = Path(__file__).parent / "recipe.yaml"
LOCAL = ("cluster.executor=local",)
SLURM = (
    "cluster.executor=slurm",
    "cluster.train.nodes=2",
    "cluster.train.ranks_per_node=1",
    "cluster.generate.nodes=2",
    "cluster.generate.ranks_per_node=1",
)


@dataclass(frozen=True)
class Fault:
    """When rank `actor` enters `phase` for the `count`-th time, rank `victim` gets the signal; or the next message of a refit
    that `actor` sends is spoiled."""

    phase: str
    victim: int
    actor: int = 0
    count: int = 2
    signal: int = signal.SIGKILL
    once: bool = False  # only in the first attempt of the run
    message: str = ""  # "flip" a bit of it, "drop" it, "die" while it is on its way


@dataclass
class Run:
    folder: Path
    status: int
    output: str
    seconds: float

    def metrics(self) -> list[dict]:
        """Every step's line, without what differs from run to run."""
        return [
            {key: value for key, value in line.items() if not key.startswith(NOT_REPRODUCIBLE)}
            for line in read(self.folder / "metrics.jsonl")
        ]

    def failure(self) -> dict:
        return latest(self.folder).failure

    def verdicts(self) -> list[str]:
        """Return the verdict on each start of the ranks, oldest first."""
        return [attempt.verdict for attempt in all_attempts(self.folder)]


def submit(folder: Path, *overrides: str, env: dict | None = None, fault: Fault | None = None, timeout: float = 240) -> Run:
    """Run `python launch/submit.py recipe=... ` in the foreground, in a run folder, to its end."""
    start = time.monotonic()
    process = launch(folder, *overrides, env=env, fault=fault)
    try:
        status = process.wait(timeout)
    finally:
        process.kill()
    return Run(folder, status, printed(folder), time.monotonic() - start)


def launch(folder: Path, *overrides: str, env: dict | None = None, fault: Fault | None = None) -> subprocess.Popen | Program:
    """Start a run without waiting.

    With a fault, each rank's process id is a file in `pids_of(folder)`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if fault:
        pids = pids_of(folder)
        pids.mkdir(exist_ok=True)
        record = {**fault.__dict__, "signal": int(fault.signal), "folder": str(pids)}
        environment |= {"HETSTEP_TEST_FAULT": json.dumps(record)}
    if fault or "HETSTEP_TEST_NCCL" in environment:
        environment["PYTHONPATH"] = str(FAULTS)
    arguments = [f"recipe={RECIPE}", f"run_dir={folder}", *overrides]
    output = _output(folder)
    output.unlink(missing_ok=True)
    if set(LOCAL) <= set(overrides) and all(name.startswith("HETSTEP_") for name in env or {}):
        return Program(warm.run, (arguments,), environment, output)
    with open(output, "wb") as printed:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch/submit.py"), *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
        )


def printed(folder: Path) -> str:
    """Return what the last `launch` of a run folder printed."""
    return _output(folder).read_text(errors="replace")


def _output(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.printed"


def pids_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.pids"


def left_alive(folder: Path, within_s: float = 15) -> list[int]:
    """Return the ranks of a run with a fault whose process still runs after a while."""
    pids = {int(path.name): int(path.read_text()) for path in pids_of(folder).glob("[0-9]*")}
    deadline = time.monotonic() + within_s
    while left := [rank for rank, pid in pids.items() if alive(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []
