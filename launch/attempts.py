"""The starts of a run, read from its folder: see pipeline/attempt.py for what each leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class AttemptFolder:
    """One start of all ranks, which may be under way."""

    folder: Path
    started: float  # unix seconds

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def logs(self) -> list[Path]:
        """The ranks' logs, in rank order."""
        return sorted(self.folder.glob("rank*.log"))

    @property
    def failure(self) -> dict[str, Any] | None:
        """The first rank that failed: {"rank", "realm", "host", "verb", "phase", "message", "traceback"}.

        The traceback is empty if that rank did not raise, but was found to be dead, silent or late.
        """
        text = self._said("failure.json")
        return json.loads(text) if text else None

    @property
    def verdict(self) -> str | None:
        """`done`, `requeue: why` or `stop: why`; None while its ranks run, or if whoever decides was ended too."""
        return self._said("verdict")

    @property
    def left(self) -> str | None:
        """Why its ranks left on purpose, with everything saved; None: they did not."""
        return self._said("requeue")

    @property
    def progress(self) -> int:
        """Step of the latest checkpoint that it completed; 0: none."""
        return int(self._said("progress") or 0)

    @property
    def bad_nodes(self) -> dict[str, str]:
        """Names of nodes -> why they are bad."""
        return dict(line.split(": ", 1) for line in (self._said("bad_nodes") or "").splitlines())

    @property
    def startup(self) -> dict[str, Any] | None:
        """The stages until its first step, as pipeline/startup.py has written them; None before it has."""
        text = self._said("startup.json")
        return json.loads(text) if text else None

    def _said(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text().strip()
        except FileNotFoundError:
            return None


def all_attempts(run_dir: Path) -> list[AttemptFolder]:
    """Return the starts of a run, oldest first."""
    found = []
    for path in (run_dir / "attempts").glob("*/started"):
        if started := path.read_text().strip():  # not just being written
            found.append(AttemptFolder(path.parent, float(started)))
    return sorted(found, key=lambda attempt: attempt.started)


def latest(run_dir: Path) -> AttemptFolder | None:
    return next(reversed(all_attempts(run_dir)), None)
