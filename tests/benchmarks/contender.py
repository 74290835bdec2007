"""Run a process that takes one training step on request, so that contenders can alternate on a busy machine.

The parent writes the line `step`, the child answers with one line of JSON: `times`, {phase: [CPU seconds, wall seconds]}, which
add up to the step, and what else the parent wants to compare. While it waits, a contender uses no CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Times = dict[str, list[float]]  # phase -> [CPU seconds of all threads of the process, wall seconds]

LONGEST_S = 900.0  # that a start or a step may take
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # more threads than free cores wait for each other, and use CPU while they do
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Contender:
    """The parent's end of a contender."""

    def __init__(self, name: str, command: list[str], log: Path):
        self.name = name
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | ENVIRONMENT
            )
        self._receive()

    def step(self) -> dict[str, Any]:
        """Return the child's answer. Raises RuntimeError with the end of its log if the process has ended."""
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        too_long = threading.Timer(LONGEST_S, self._process.kill)
        too_long.start()
        line = self._process.stdout.readline()
        too_long.cancel()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-20:])
            raise RuntimeError(f"{self.name} has ended with status {self._process.wait()}; the end of {self._log}:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Turns:
    """The child's end. Everything else printed to stdout goes to stderr."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def reply(self, value: dict) -> None:
        print(json.dumps(value), file=self._replies, flush=True)

    def wait(self) -> bool:
        """Return whether there is another step to take."""
        return bool(sys.stdin.readline())


class Clock:
    """Measures the time of a step's phases."""

    def __init__(self) -> None:
        self._times: Times = {}
        self._last = (0.0, 0.0)

    @contextmanager
    def phase(self, name: str, verb: str | None = None) -> Iterator[None]:
        begun = _now()
        yield
        self._spend(name, begun, _now())

    def start(self) -> None:
        """Begin the first of several laps."""
        self._last = _now()

    def lap(self, name: str) -> None:
        """Count a phase that began where the last one ended, for phases that no `with` can enclose."""
        now = _now()
        self._spend(name, self._last, now)
        self._last = now

    def _spend(self, name: str, begun: tuple[float, float], ended: tuple[float, float]) -> None:
        spent = self._times.setdefault(name, [0.0, 0.0])
        for clock in (0, 1):
            spent[clock] += ended[clock] - begun[clock]

    def take(self) -> Times:
        """Return the counts since the last call."""
        times, self._times = self._times, {}
        return times


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()
