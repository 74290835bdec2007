"""Exports that run beside the service: each is `python launch/export.py` in a process of its own, for it imports torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from launch.executors.base import ROOT
from launch.serving.models import ExportAnswer
from pipeline.config import Problem, RecipeError

MAX_EXPORTS = 2
"""Exports at once."""
LONGEST = 2000
"""Characters of a failed export's message."""


@dataclass
class _Export:
    process: subprocess.Popen[bytes]
    log: Path


class Exports:
    """The exports that this service has started, and those in the runs' folders."""

    def __init__(self) -> None:
        self._started: dict[Path, _Export] = {}
        self._lock = threading.Lock()

    def start(self, run: Path, step: int, adapter: bool) -> ExportAnswer:
        """Start an export, unless it goes on or exists. Raises RecipeError while MAX_EXPORTS go on."""
        folder = run / f"{'adapter' if adapter else 'hf'}_step_{step}"
        with self._lock:
            if (found := self._state(folder)) and found.state != "failed":
                return found
            if sum(each.process.poll() is None for each in self._started.values()) >= MAX_EXPORTS:
                raise RecipeError(Problem("step", "in-use", f"got {MAX_EXPORTS} exports that go on; expected fewer. Try later"))
            log = run / f".{folder.name}.log"
            command = [sys.executable, str(ROOT / "launch/export.py"), f"run={run}", f"step={step}"]
            command += ["adapter=true"] if adapter else []
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            self._started[folder] = _Export(process, log)
        return ExportAnswer(folder=str(folder), state="running")

    def of(self, run: Path) -> list[ExportAnswer]:
        """Return the exports of a run, by folder."""
        with self._lock:
            folders = {path for kind in ("hf", "adapter") for path in run.glob(f"{kind}_step_*")}
            folders |= {folder for folder in self._started if folder.parent == run}
            return [found for folder in sorted(folders) if (found := self._state(folder))]

    def _state(self, folder: Path) -> ExportAnswer | None:
        started = self._started.get(folder)
        if started and started.process.poll() is None:
            return ExportAnswer(folder=str(folder), state="running")
        if folder.is_dir():
            return ExportAnswer(folder=str(folder), state="done")
        if started:
            why = started.log.read_text(errors="replace")[-LONGEST:] if started.log.exists() else ""
            return ExportAnswer(folder=str(folder), state="failed", why=why.strip())
        return None
