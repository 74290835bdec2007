"""Run exports beside the service. Each is `python launch/export.py` in its own process, because it imports torch."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from launch.executors.executor import ROOT, start_detached
from launch.governance import audit_log
from launch.serving.bodies import ExportAnswer
from pipeline.config import Problem, RecipeError
from pipeline.recipe import user_files

KINDS = ("hf", "adapter")
MAX_EXPORTS = 2
"""Maximum number of exports at once."""
LONGEST = 2000
"""Maximum number of characters of a failed export's message."""


class Exports:
    """Manages the exports in the runs' folders.

    The process of an export holds a lock on its log, whichever service started it.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def start(self, run: Path, step: int, adapter: bool) -> ExportAnswer:
        """Start an export, and return its state. Does nothing if the export is running or complete.

        Raises RecipeError while MAX_EXPORTS exports run.
        """
        folder = run / f"{'adapter' if adapter else 'hf'}_step_{step}"
        with self._lock:
            if (found := _state(folder)) and found.state != "failed":
                return found
            self._started = [each for each in self._started if each.poll() is None]
            if len(self._started) >= MAX_EXPORTS:
                raise RecipeError(Problem("step", "in-use", f"got {MAX_EXPORTS} running exports; expected fewer. Try later"))
            command = [sys.executable, str(ROOT / "launch/export.py"), f"run={run}", f"step={step}"]
            command += ["adapter=true"] if adapter else []
            with _log(folder).open("ab") as output:
                try:
                    fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the process inherits with its output
                except BlockingIOError:  # another service has just started it
                    return ExportAnswer(folder=str(folder), state="running")
                output.truncate(0)
                self._started.append(start_detached(command, output, audit_log.environment()))
        return ExportAnswer(folder=str(folder), state="running")

    def of(self, run: Path) -> list[ExportAnswer]:
        """Return the exports of a run, sorted by folder."""
        with self._lock:
            folders = {path for kind in KINDS for path in run.glob(f"{kind}_step_*")}
            folders |= {path.with_name(path.stem[1:]) for kind in KINDS for path in run.glob(f".{kind}_step_*.log")}
            return [found for folder in sorted(folders) if (found := _state(folder))]


def _log(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.log")


def _state(folder: Path) -> ExportAnswer | None:
    """Return the state of the export in a folder; None if no export was started there."""
    log = _log(folder)
    if _is_locked(log):
        return ExportAnswer(folder=str(folder), state="running")
    if folder.is_dir():
        return ExportAnswer(folder=str(folder), state="done")
    if log.exists():
        with user_files.open_file(log) as file:
            file.seek(-min(4 * LONGEST, file.seek(0, os.SEEK_END)), os.SEEK_END)
            why = file.read(4 * LONGEST).decode(errors="replace")[-LONGEST:].strip()
        return ExportAnswer(folder=str(folder), state="failed", why=why)
    return None


def _is_locked(log: Path) -> bool:
    try:
        with user_files.open_file(log) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
