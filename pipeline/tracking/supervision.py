"""Keep the trackers' process alive beside rank 0.

All of this happens in a thread. Rank 0 itself waits for the process only after its last step, and not for long. The process has
its own session and writes to a file, attempts/NAME/trackers.log, so that neither the process nor the rank can block the other.
Its warnings are repeated in the rank's log.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pipeline.config import Recipe
from pipeline.seams.job_events import JobObserver
from pipeline.tracking.feed import brief, enabled_trackers

logger = logging.getLogger(__name__)

BEHIND = 4
"""Exit status of a process that could not send everything in time."""
LOG = "trackers.log"
POLL_S = 1.0
RESTARTS = 8
"""Starts after the first one. The pause before each is twice as long as the last."""
LONG_LIFE_S = 600.0
"""A process that lived longer than this counts as the first one again."""
LAST_WAIT_S, LEAVING_WAIT_S = 35.0, 5.0
"""Seconds to wait for the process at the end of a complete run, and of one that goes on in another attempt."""
HIDDEN = ("HETSTEP_RANK", "HETSTEP_COMPONENT", "HETSTEP_SECRET")
"""Variables of the rank that the process does not get."""


class TrackerProcess:
    """Rank 0's handle on the trackers' process."""

    def __init__(self, command: Sequence[str], run_dir: Path, folder: Path):
        """Start a thread that runs `command`, the command of the process. folder: the attempt's."""
        self._command = command
        self._run_dir = run_dir
        self._log = folder / LOG
        self._read = 0  # bytes of the log
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="trackers", daemon=True)
        self._thread.start()

    def _keep_alive(self) -> None:
        pause, restarts = POLL_S, 0
        while True:
            begun, last = time.monotonic(), self._ending.is_set()
            try:
                ended = self._run_once()
            except Exception as error:  # no memory or no file handle for a process, say
                ended = brief(error)
            if not ended or last:
                return
            if time.monotonic() - begun > LONG_LIFE_S:
                pause, restarts = POLL_S, 0
            if restarts == RESTARTS:
                logger.warning("the trackers' process ended again (%s) and does not start again; `python launch/track.py"
                               " run=%s` sends the missing steps", ended, self._run_dir)  # fmt: skip
                return
            restarts += 1
            logger.warning("the trackers' process ended (%s); it starts again in %g s", ended, pause)
            self._ending.wait(pause)
            pause *= 2

    def _run_once(self) -> str:
        """Run the process to its end, and return the reason to start it again; "" if there is none."""
        env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        with self._opened() as log:
            process = subprocess.Popen(
                self._command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert process.stdin is not None
        asked_at = None
        while process.poll() is None:
            self._repeat_warnings()
            if self._ending.is_set() and asked_at is None:
                process.stdin.close()  # the sign to end; nothing is ever written
                asked_at = time.monotonic()
            if asked_at is not None and time.monotonic() - asked_at > LAST_WAIT_S:
                process.kill()
            time.sleep(0.1) if asked_at else self._ending.wait(POLL_S)
        process.stdin.close()
        self._repeat_warnings()
        if process.returncode in (0, BEHIND):  # it has said what is missing
            return ""
        return f"exit status {process.returncode}" if process.returncode > 0 else signal.Signals(-process.returncode).name

    def _opened(self) -> IO[Any]:
        try:
            return open(self._log, "ab")
        except OSError:  # a full disk
            return open(os.devnull, "ab")

    def _repeat_warnings(self) -> None:
        try:
            with open(self._log, "rb") as file:
                file.seek(self._read)
                lines = [line for line in file.readlines() if line.endswith(b"\n")]
        except OSError:
            return
        self._read += sum(map(len, lines))
        for line in lines:
            _, level, told = line.decode(errors="replace").strip().partition(" WARNING ")
            if level:
                logger.warning("trackers: %s", told.partition(" ")[2])

    def is_alive(self) -> bool:
        """Return whether the process runs or will be started again."""
        return self._thread.is_alive()

    def stop(self, wait_s: float) -> None:
        """Tell the process to send the last steps and end, and wait for its end, `wait_s` seconds at most."""
        self._ending.set()
        self._thread.join(wait_s)
        if self.is_alive():
            logger.warning("the trackers' process is still sending; `python launch/track.py run=%s` sends the rest",
                           self._run_dir)  # fmt: skip


def start(recipe: Recipe, run_dir: Path, folder: Path) -> TrackerProcess | None:
    """Start the process of a recipe's trackers; return None if the recipe has no tracker. folder: the attempt's."""
    if not enabled_trackers(recipe):
        return None
    command = [
        sys.executable,
        "-P",
        "-u",
        "-m",
        "pipeline.tracking.tracking_process",
        str(run_dir),
        folder.name,
        str(os.getpid()),
    ]
    return TrackerProcess(command, run_dir, folder)


class TrackingObserver(JobObserver):
    """Runs the trackers' process while rank 0 coordinates."""

    def __init__(self) -> None:
        """Build the observer; `claimed` starts the process."""
        self._process: TrackerProcess | None = None

    def claimed(self, recipe: Recipe, run_dir: Path, attempt: Path) -> None:
        """Start the process if the recipe has trackers."""
        self._process = start(recipe, run_dir, attempt)

    def left(self, goes_on: bool) -> None:
        """Tell the process to end, and wait for it."""
        if self._process is not None:
            self._process.stop(LEAVING_WAIT_S if goes_on else LAST_WAIT_S)


OBSERVER = TrackingObserver()
