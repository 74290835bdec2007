"""Run the parts in processes of their own, within their time, and end these with all that they have started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from pipeline.node import python_path
from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.parts import MACHINE, Part
from tests.gpu_check.table import FAILED, LATE, PASSED, Result

ROOT = Path(__file__).parents[2]
ENDS_S = 10.0
"""Time for a killed process to end."""
RUN_ENDS_S = 30.0
"""Time for a run's controller to end its ranks and itself."""
START_S = 10.0
"""About what a worker takes to import what a part needs."""
LOG_CHARACTERS = 8000


class Processes:
    """Runs one part at a time. Parts with a call share one worker until one fails or has a program of its own."""

    def __init__(self, place: Place):
        self.place = place
        self._worker: subprocess.Popen | None = None
        self._log = place.folder / "log"
        self._begins = 0  # of the part's output in the log

    def expected(self, part: Part) -> float:
        """Return about how many seconds a part takes."""
        starts = part.call and part.name != MACHINE and (part.alone or self._worker is None)
        return part.expected(self.place) + (START_S if starts else 0.0)

    @property
    def log(self) -> str:
        """The end of the part's output."""
        with self._log.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode(errors="replace")[-LOG_CHARACTERS:]

    def run(self, part: Part, limit_s: float) -> Result:
        """Run a part."""
        if part.command or part.alone:
            self.end_worker()
        result = self._program(part, limit_s) if part.command else self._call(part, limit_s)
        if part.alone or (part.call and result.outcome != PASSED):
            self.end_worker()
        return result

    def _call(self, part: Part, limit_s: float) -> Result:
        self._worker = worker = self._worker or self._start_worker()
        self._begins = self._log.stat().st_size
        with contextlib.suppress(BrokenPipeError):  # it has ended
            print(json.dumps([self.place.gpus, *part.call]), file=worker.stdin, flush=True)
        ready, _, _ = select.select([worker.stdout], [], [], limit_s)
        answer = worker.stdout.readline() if ready else ""
        if not ready:
            return _late(part, limit_s)
        if not answer:
            return Result(part.name, FAILED, f"its process ended with status {worker.wait()}")
        measured = Measurement(**json.loads(answer))
        outcome, note = (
            (FAILED if measured.problems else PASSED),
            "; ".join([*measured.problems, *filter(None, [measured.note])]),
        )
        return Result(part.name, outcome, note, measured.numbers, measured.details)

    def _start_worker(self) -> subprocess.Popen:
        arguments = (self.place.device, self.place.size, str(self.place.folder))
        command = [sys.executable, "-m", "tests.gpu_check.worker", *arguments]
        with self._log.open("w") as log:
            pipe = subprocess.PIPE
            return self._start(command, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def end_worker(self) -> None:
        """End the worker, so that it holds no GPU."""
        if self._worker:
            _end(self._worker)
            self._worker = None

    def _program(self, part: Part, limit_s: float) -> Result:
        assert part.command and part.judge
        self._begins = 0
        with self._log.open("w") as log:
            process = self._start(part.command(), stdout=log, stderr=subprocess.STDOUT)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return _late(part, limit_s)
        finally:
            _end(process, part.run_dir)
        return part.judge(part.name, status, self._log.read_text(errors="replace"))

    def _start(self, command, **streams: int | IO | bool) -> subprocess.Popen:
        hidden = {} if self.place.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        environment = {**python_path.with_package(os.environ), "HF_HUB_OFFLINE": "1", **hidden}
        # In a session of its own, so that what it starts is ended with it.
        return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)


def _late(part: Part, limit_s: float) -> Result:
    return Result(part.name, LATE, f"it has not ended within {limit_s:.0f} s")


def _end(process: subprocess.Popen, run_dir: Path | None = None) -> None:
    """End the processes of a part: its process group and, for a run, the controller with its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for the GPU's driver does not end
        process.wait(ENDS_S)
    for stream in (process.stdin, process.stdout):
        if stream:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    if run_dir is None:
        return
    from launch.executors.record import read_record

    if record := read_record(run_dir):
        job = record.attach(run_dir)  # in a session of its own
        job.cancel()
        deadline = time.monotonic() + RUN_ENDS_S
        while not job.status(now=True).ended and time.monotonic() < deadline:
            time.sleep(0.1)
