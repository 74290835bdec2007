"""The runs below the root, and their states, read once for all clients.

Clients poll far more often than a run changes. A listing and the state of a live run are kept for `cache_s` seconds. The state
of a run that has ended is kept until one of its files changes. One thread at a time computes each value; others wait for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from launch.api.run import ENDED
from launch.pages import report_page
from launch.runs import run_state, run_summary, status_text
from launch.runs.run_folder import RunFolder, find
from launch.serving.access import AccessError
from launch.serving.settings import ServiceConfig
from pipeline.config import RecipeError

SEPARATOR = "~"
"""Between the folders of an id, in place of a slash."""
DEPTH = 6
"""Most levels from the root to a run: USER/sweeps/SUITE/ID/runs/NAME."""
ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}(~[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}){{0,{DEPTH - 1}}}")
"""The form of an id of a run or a sweep: its path below the root. No part begins with a dot."""
FILES = ("metrics.jsonl", "done.json", "job.json", "recipe.yaml", "attempts", "attempts/current", "checkpoints", "scores.json")
"""Files that change when a run that has ended is continued or scored."""
MAX_REPORTS = 32
"""Reports that are kept; each has some megabytes."""

Value = TypeVar("Value")


@dataclass
class _Slot(Generic[Value]):
    """A value, and what it was computed from."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    value: Value | None = None
    made: float = float("-inf")  # monotonic seconds
    mark: tuple[Any, ...] | None = None  # of the files of a run that has ended; None: the value gets old


class RunCache:
    """Finds runs by id and summarizes them."""

    def __init__(self, config: ServiceConfig):
        """Take the service's settings."""
        self.root = Path(config.root).resolve()
        self._users, self._keep_s = config.users, config.cache_s
        self._slots: dict[tuple[str, str], _Slot[Any]] = {}
        self._guard = threading.Lock()

    def ids(self) -> list[str]:
        """Return the ids of all runs. A folder with a name that is no id is left out."""

        def found() -> tuple[list[str], None]:
            ids = [*filter(ID.fullmatch, map(self.id, find(self.root, DEPTH)))]
            self._drop_removed(set(ids))
            return ids, None

        return self.kept(("", "ids"), found)

    def id(self, folder: Path) -> str:
        """Return the id of a folder below the root."""
        return str(folder.relative_to(self.root)).replace("/", SEPARATOR)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run. Raises AccessError with 404 for what is no run below the root."""
        if path := self.below(run_id, "recipe.yaml"):
            return path
        raise AccessError(404, "not-a-run", "got an id that is no run's; expected one of GET /api/v1/runs")

    def below(self, given: str, *marks: str) -> Path | None:
        """Return the folder of an id, if it is below the root and has one of the files `marks`; None otherwise."""
        if ID.fullmatch(given):
            path = self.root.joinpath(*given.split(SEPARATOR))
            if any((path / mark).is_file() for mark in marks) and path.resolve().is_relative_to(self.root):
                return path
        return None

    def owner(self, run_id: str) -> str:
        """Return the user whose run it is: those in ROOT/USER are USER's. "" for a run that only an admin may change."""
        first, _, rest = run_id.partition(SEPARATOR)
        return first if rest and first in self._users else ""

    def line(self, run_id: str) -> dict[str, Any]:
        """Return the short summary of a run, for lists. A run that cannot be read has `state` and `why` alone."""
        return self._summary(run_id, "line", run_summary.line)

    def lines(self) -> list[dict[str, Any]]:
        """Return the short summaries of all runs, newest first."""
        found = []
        for run_id in self.ids():
            with contextlib.suppress(AccessError):  # removed meanwhile
                found.append(self.line(run_id))
        return sorted(found, key=lambda line: -line.get("last_written", 0.0))

    def full(self, run_id: str) -> dict[str, Any]:
        """Return the whole summary of a run."""
        return self._summary(run_id, "full", run_summary.full)

    def report(self, run_id: str) -> str:
        """Return the report of a run as HTML, which loads plotly.min.js beside its address. Raises RecipeError."""
        folder = self.folder(run_id)

        def written() -> tuple[str, tuple[Any, ...] | None]:
            mark, labelled = self._mark(folder), report_page.read([folder])
            states = run_state.states([each.run for each in labelled])
            return report_page.page(labelled, states), mark if states[0].name in ENDED else None

        self._drop_reports()
        return self.kept((run_id, "report"), written, folder)

    def forget(self, run_id: str) -> None:
        """Drop what is known of a run that has just been changed, and the listing."""
        with self._guard:
            for key in [key for key in self._slots if key[0] in (run_id, "")]:
                del self._slots[key]

    def _drop_removed(self, listed: set[str]) -> None:
        """Drop what is known of runs whose folders are gone. listed: ids of runs that are there."""
        with self._guard:
            others = {run_id for run_id, kind in self._slots if kind in ("line", "whole", "report")} - listed
        removed = {run_id for run_id in others if self.below(run_id, "recipe.yaml") is None}
        with self._guard:
            for key in [key for key in self._slots if key[0] in removed]:
                del self._slots[key]

    def _drop_reports(self) -> None:
        """Drop the oldest reports above MAX_REPORTS."""
        with self._guard:
            kept = [key for key in self._slots if key[1] == "report"]
            for key in kept[: max(0, len(kept) - MAX_REPORTS)]:
                del self._slots[key]

    # ---- caching --------------------------------------------------------------------------------------------------------

    def _summary(self, run_id: str, kind: str, summarize: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        folder = self.folder(run_id)

        def made() -> tuple[dict[str, Any], tuple[Any, ...] | None]:
            mark = self._mark(folder)  # first: what changes meanwhile makes the value old
            found = {"id": run_id, "owner": self.owner(run_id)}
            try:
                run = RunFolder.at(folder)
                found |= summarize(run, run_state.state(run))
            except Exception as error:  # damaged files of one run do not hide the others
                why = str(error) if isinstance(error, RecipeError | OSError) else f"{type(error).__name__}: {error}"
                found |= {"folder": str(folder), "state": "unknown", "why": why}
            may_change = found["state"] not in ENDED or bool(found.get("evaluations"))  # evaluations go on after a run's end
            return status_text.plain_values(found), None if may_change else mark

        return self.kept((run_id, kind), made, folder)

    def kept(
        self, key: tuple[str, str], make: Callable[[], tuple[Value, tuple[Any, ...] | None]], folder: Path | None = None
    ) -> Value:
        """Return the value of a key, made anew if it is old, or if the run's files have changed since."""
        with self._guard:
            slot = self._slots.setdefault(key, _Slot())
        with slot.lock:
            if slot.value is not None:
                if time.monotonic() - slot.made < self._keep_s:
                    return slot.value
                if slot.mark is not None and folder is not None and slot.mark == self._mark(folder):
                    return slot.value
            slot.value, slot.mark = make()
            slot.made = time.monotonic()
            return slot.value

    def _mark(self, folder: Path) -> tuple[Any, ...]:
        """Return (size, time of the last change) of each file that changes with a run; None for those that are not there."""
        found = []
        for name in FILES:
            try:
                stat = os.stat(folder / name)
                found.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)
