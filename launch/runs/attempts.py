"""Read the attempts of a run from its folder. pipeline/job/attempt.py describes the files that each attempt writes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from launch.runs.run_files import FailureRecord, StartupRecord
from pipeline.files import small_files

STOP = "stop"
"""Name of the file that marks an attempt whose ranks somebody asked to save and stop. verdict.sh then requests no restart."""


@dataclass(frozen=True)
class AttemptFolder:
    """One start of all ranks, which may still run."""

    folder: Path
    started: float  # unix seconds

    @property
    def name(self) -> str:
        """Return the attempt's id: JOB-RESTART, such as `17-0`."""
        return self.folder.name

    @property
    def logs(self) -> list[Path]:
        """Return the paths of the ranks' logs, in rank order."""
        return sorted(self.folder.glob("rank*.log"))

    @property
    def failure(self) -> FailureRecord | None:
        """Return failure.json, about the first rank that failed; None if no rank has failed.

        Raises RecipeError for a damaged file, as all properties do.
        """
        return small_files.read(self.folder / "failure.json", FailureRecord)

    @property
    def verdict(self) -> str | None:
        """Return `done`, `requeue: why` or `stop: why`; None while the ranks run, or if the deciding process was killed."""
        return self._read("verdict")

    @property
    def requeue_reason(self) -> str | None:
        """Return why the ranks saved everything and exited to be started again; None if they did not."""
        return self._read("requeue")

    @property
    def asked_to_stop(self) -> bool:
        """Return whether somebody asked the ranks to save and stop."""
        return (self.folder / STOP).exists()

    @property
    def stopped_as_asked(self) -> bool:
        """Return whether the ranks saved everything and exited because somebody asked them to."""
        return self.asked_to_stop and self.requeue_reason is not None and self.failure is None

    @property
    def progress(self) -> int:
        """Return the step of the latest checkpoint that the attempt completed; 0 without one."""
        text = self._read("progress") or "0"
        if not re.fullmatch(r"\d{1,15}", text):
            raise small_files.damaged(self.folder / "progress", f"{text[:80]!r}", "the step of a checkpoint")
        return int(text)

    @property
    def bad_nodes(self) -> dict[str, str]:
        """Return node name -> why the node failed its checks, for the nodes that did."""
        lines = (self._read("bad_nodes") or "").splitlines()
        return {node: reason for node, _, reason in (line.partition(": ") for line in lines)}

    @property
    def startup(self) -> StartupRecord | None:
        """Return startup.json, the stages until the first step; None if there is none yet."""
        return small_files.read(self.folder / "startup.json", StartupRecord)

    def _read(self, name: str) -> str | None:
        text = small_files.read_text(self.folder / name)
        return None if text is None else text.strip()


def all_attempts(run_dir: Path) -> list[AttemptFolder]:
    """Return the attempts of a run, oldest first."""
    attempts = []
    for path in (run_dir / "attempts").glob("*/started"):
        if (started := _start_time(path)) is not None:
            attempts.append(AttemptFolder(path.parent, started))
    return sorted(attempts, key=lambda attempt: attempt.started)


def _start_time(path: Path) -> float | None:
    """Return the unix seconds in the file `started`, or of its last write if a crash damaged it; None while it is written."""
    try:
        text = small_files.read_text(path) or ""
        started = float(text) if text.strip() else None
    except ValueError:
        started = math.nan
    return started if started is None or 0 <= started < small_files.LAST_MOMENT else path.stat().st_mtime


def of_job(run_dir: Path, job_id: str) -> list[AttemptFolder]:
    """Return the attempts of a job, oldest first. Their names are JOB-N, local-JOB-...-N or ALLOCATION.JOB-N."""
    return [attempt for attempt in all_attempts(run_dir) if job_id in re.split("[-.]", attempt.name)]


def latest(run_dir: Path) -> AttemptFolder | None:
    """Return the newest attempt of a run; None before the first."""
    return next(reversed(all_attempts(run_dir)), None)
