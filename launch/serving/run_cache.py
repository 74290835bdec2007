"""Find the runs below the root, and cache what is known about them for all clients.

Clients poll far more often than a run changes. A listing and the state of a live run are kept for `cache_s` seconds. The state
of a run that has ended is kept until one of its files changes. Only one thread at a time computes a value; others wait for it.
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
"""Separates the folders in an id, in place of a slash."""
DEPTH = 6
"""Maximum number of levels from the root to a run: USER/sweeps/SUITE/ID/runs/NAME."""
ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}(~[A-Za-z0-9][A-Za-z0-9_.-]{{0,99}}){{0,{DEPTH - 1}}}")
"""The form of an id of a run or a sweep: its path below the root. No part begins with a dot."""
FILES = ("metrics.jsonl", "done.json", "job.json", "recipe.yaml", "attempts", "attempts/current", "checkpoints", "scores.json")
"""Files that change if a run that has ended is continued or scored."""
MAX_REPORTS = 32
"""Maximum number of cached reports; each has some megabytes."""

Value = TypeVar("Value")


@dataclass
class _Slot(Generic[Value]):
    """A cached value, and what it was computed from."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    value: Value | None = None
    made: float = float("-inf")  # monotonic seconds
    mark: tuple[Any, ...] | None = None  # of the files of a run that has ended; None: the value gets old


class RunCache:
    """Finds runs by id and summarizes them."""

    def __init__(self, config: ServiceConfig):
        """Create an empty cache for the runs of a service. config: the settings of the service."""
        self.root = Path(config.root).resolve()
        self._users, self._keep_s = config.users, config.cache_s
        self._slots: dict[tuple[str, str], _Slot[Any]] = {}
        self._guard = threading.Lock()

    def ids(self) -> list[str]:
        """Return the ids of all runs, without folders whose name cannot be an id."""

        def found() -> tuple[list[str], None]:
            ids = [*filter(ID.fullmatch, map(self.id, find(self.root, DEPTH)))]
            self._drop_removed(set(ids))
            return ids, None

        return self.kept(("", "ids"), found)

    def id(self, folder: Path) -> str:
        """Return the id of a folder below the root."""
        return str(folder.relative_to(self.root)).replace("/", SEPARATOR)

    def folder(self, run_id: str) -> Path:
        """Return the folder of a run. Raises AccessError with status 404 if the id is not of a run below the root."""
        if path := self.below(run_id, "recipe.yaml"):
            return path
        raise AccessError(404, "not-a-run", "got an id of no run; expected an id from GET /api/v1/runs")

    def below(self, given: str, *marks: str) -> Path | None:
        """Return the folder of an id; None if it is not below the root, or has none of the files `marks`."""
        if ID.fullmatch(given):
            path = self.root.joinpath(*given.split(SEPARATOR))
            if any((path / mark).is_file() for mark in marks) and path.resolve().is_relative_to(self.root):
                return path
        return None

    def owner(self, run_id: str) -> str:
        """Return the owner of a run: USER for runs in ROOT/USER; "" for a run that only an admin may change."""
        first, _, rest = run_id.partition(SEPARATOR)
        return first if rest and first in self._users else ""

    def line(self, run_id: str) -> dict[str, Any]:
        """Return the short summary of a run, for lists.

        If the run cannot be read, its state is `unknown`, and `why` has the error.
        """
        return self._summary(run_id, "line", run_summary.line)

    def lines(self) -> list[dict[str, Any]]:
        """Return the short summaries of all runs, newest first."""
        found = []
        for run_id in self.ids():
            with contextlib.suppress(AccessError):  # removed meanwhile
                found.append(self.line(run_id))
        return sorted(found, key=lambda line: -line.get("last_written", 0.0))

    def full(self, run_id: str) -> dict[str, Any]:
        """Return the full summary of a run."""
        return self._summary(run_id, "full", run_summary.full)

    def report(self, run_id: str) -> str:
        """Return the report of a run as an HTML page that loads `plotly.min.js` beside its own address. Raises RecipeError."""
        folder = self.folder(run_id)

        def written() -> tuple[str, tuple[Any, ...] | None]:
            mark, labelled = self._mark(folder), report_page.read([folder])
            states = run_state.states([each.run for each in labelled])
            return report_page.page(labelled, states), mark if states[0].name in ENDED else None

        self._drop_reports()
        return self.kept((run_id, "report"), written, folder)

    def forget(self, run_id: str) -> None:
        """Drop the listing, and the cached values of a run that has just been changed."""
        with self._guard:
            for key in [key for key in self._slots if key[0] in (run_id, "")]:
                del self._slots[key]

    def _drop_removed(self, listed: set[str]) -> None:
        """Drop the cached values of runs whose folders are gone. listed: the ids of runs that exist."""
        with self._guard:
            others = {run_id for run_id, kind in self._slots if kind in ("line", "full", "report")} - listed
        removed = {run_id for run_id in others if self.below(run_id, "recipe.yaml") is None}
        with self._guard:
            for key in [key for key in self._slots if key[0] in removed]:
                del self._slots[key]

    def _drop_reports(self) -> None:
        """Drop the oldest reports if there are more than MAX_REPORTS."""
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
        """Return the cached value of a key, or compute it with `make`.

        A value is reused for `cache_s` seconds, and longer while the files of `folder` have the same mark. make: a function
        that returns (value, mark of the files as `_mark` returns it); a mark of None lets the value get old.
        """
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
        """Return (size, modification time) of each file that changes with a run; None for a missing file."""
        found = []
        for name in FILES:
            try:
                stat = os.stat(folder / name)
                found.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)
