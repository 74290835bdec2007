"""Read the attempts of a run from its folder. pipeline/attempt.py describes the files that each attempt writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KILLED = "killed"
"""The file in which the local controller names the first rank that a signal ended."""
STOP = "stop"
"""The file of an attempt that somebody asked to save and stop. verdict.sh then requests no restart."""


@dataclass(frozen=True)
class AttemptFolder:
    """One start of all ranks. It may still run."""

    folder: Path
    started: float  # unix seconds

    @property
    def name(self) -> str:
        """The attempt's id: JOB-RESTART, such as `17-0`."""
        return self.folder.name

    @property
    def logs(self) -> list[Path]:
        """Paths of the ranks' logs, in rank order."""
        return sorted(self.folder.glob("rank*.log"))

    @property
    def failure(self) -> dict[str, Any] | None:
        """The first rank that failed: {"rank", "realm", "host", "verb", "phase", "message", "traceback"}.

        None if no rank has failed. The traceback is empty if the rank did not raise, but died, hung or missed a deadline.
        """
        text = self._read("failure.json")
        return json.loads(text) if text else None

    @property
    def verdict(self) -> str | None:
        """`done`, `requeue: why` or `stop: why`; None while the ranks run, or if the process that decides was killed."""
        return self._read("verdict")

    @property
    def requeue_reason(self) -> str | None:
        """Why the ranks saved everything and exited to be started again; None if they did not."""
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
        """Step of the latest checkpoint that the attempt completed; 0 if none."""
        return int(self._read("progress") or 0)

    @property
    def bad_nodes(self) -> dict[str, str]:
        """Why nodes failed their checks, by node name."""
        return dict(line.split(": ", 1) for line in (self._read("bad_nodes") or "").splitlines())

    @property
    def startup(self) -> dict[str, Any] | None:
        """startup.json: the stages until the first step, written by pipeline/startup.py; None if there is none yet."""
        text = self._read("startup.json")
        return json.loads(text) if text else None

    def _read(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text().strip()
        except FileNotFoundError:
            return None


def all_attempts(run_dir: Path) -> list[AttemptFolder]:
    """Return the attempts of a run, oldest first."""
    found = []
    for path in (run_dir / "attempts").glob("*/started"):
        if started := path.read_text().strip():  # else it is being written
            found.append(AttemptFolder(path.parent, float(started)))
    return sorted(found, key=lambda attempt: attempt.started)


def of_job(run_dir: Path, job_id: str) -> list[AttemptFolder]:
    """Return the attempts of a job, oldest first: JOB-0, JOB-1 ..., local-JOB-... or ALLOCATION.JOB-..."""
    return [each for each in all_attempts(run_dir) if job_id in re.split("[-.]", each.name)]


def latest(run_dir: Path) -> AttemptFolder | None:
    """Return the newest attempt of a run; None before the first."""
    return next(reversed(all_attempts(run_dir)), None)
