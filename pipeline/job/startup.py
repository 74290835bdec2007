"""Record the stages of a starting run until its first step has ended: attempts/NAME/startup.json, for `status` and timelines.

    {"began": unix seconds, "here": ranks that have joined, "world": world size,
     "stages": [[name, began, ended], ...],                       rank 0's stages, one after another
     "realms": {"train": [[activity, began, ended], ...], ...}}   per component: the activity of most of its ranks during setup

`ended` is null for a stage or activity in progress; in a failed run, the stage and activities in which it failed stay so. Times
are by rank 0's clock. Ranks report their activity with heartbeats, so it is up to a second late. Rank 0 writes the file when it
has changed, at most twice a second; if the file cannot be written, the run continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "startup.json"
LOOK_S = 0.5
SETTING_UP = "set up"
"""The stage in which components do different things at the same time."""

LED = ("idle", "join", "serve", "coordinate")
"""Verbs in which a rank waits or leads other ranks."""

Doing = tuple[str, str]
"""The (verb, phase) of a rank."""


@dataclass
class Row:
    """A stage or activity, with its times in unix seconds."""

    name: str
    began: float
    ended: float | None = None


class Startup:
    """Writes startup.json on rank 0; without a folder it does nothing. Not thread-safe."""

    def __init__(
        self,
        folder: Path | None = None,
        components: Mapping[str, Iterable[int]] | None = None,
        activities: Callable[[], Mapping[int, Doing]] = dict,
    ) -> None:
        """Begin to watch. activities: returns the (verb, phase) of each rank that has joined.

        folder: of the attempt. components: name -> ranks.
        """
        self._path = folder / NAME if folder else None
        self._components = {name: tuple(ranks) for name, ranks in (components or {}).items() if ranks}
        self._activities = activities
        self._began = time.time()
        self._stages: list[Row] = []
        self._rows: dict[str, list[Row]] = {name: [] for name in self._components}
        self._written = ""
        self._over = threading.Event()
        self._lock = threading.Lock()
        if self._path:
            threading.Thread(target=self._watch, name="startup", daemon=True).start()

    def enter(self, stage: str) -> None:
        """Begin a stage. It lasts until the next stage or `end`."""
        self._change_stage(stage)

    def end(self) -> None:
        """End the record, because the first step or the run has ended."""
        if not self._over.is_set():
            self._over.set()
            self._change_stage(None)

    def _change_stage(self, stage: str | None) -> None:
        if self._path is None:
            return
        with self._lock:
            now = time.time()
            self._look(now)
            if stage != SETTING_UP:
                _end_rows([row for rows in self._rows.values() for row in rows[-1:]], now)
            _end_rows(self._stages[-1:], now)
            self._stages += [Row(stage, now)] if stage else []
            self._write()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            with self._lock:
                self._look(time.time())
                self._write()

    def _look(self, now: float) -> None:
        if not self._stages or self._stages[-1].name != SETTING_UP:
            return
        activities = self._activities()
        for name, ranks in self._components.items():
            activity, rows = _activity([activities[rank] for rank in ranks if rank in activities]), self._rows[name]
            if not rows or rows[-1].name != activity:
                _end_rows(rows[-1:], now)
                rows.append(Row(activity, now))

    def _write(self) -> None:
        if self._path is None:
            return
        world = sum(map(len, self._components.values()))
        state: dict[str, Any] = {"began": self._began, "here": len(self._activities()), "world": world}
        state["stages"] = [[row.name, row.began, row.ended] for row in self._stages]
        state["realms"] = {name: [[r.name, r.began, r.ended] for r in rows] for name, rows in self._rows.items() if rows}
        text = json.dumps(state)
        if text == self._written:
            return
        temporary = self._path.with_name(f".{NAME}.{os.getpid()}")
        with contextlib.suppress(OSError):  # without this file the run continues
            temporary.write_text(text)
            temporary.replace(self._path)
            self._written = text


def _end_rows(rows: list[Row], now: float) -> None:
    for row in rows:
        if row.ended is None:
            row.ended = now


def _activity(doings: list[Doing]) -> str:
    """Return the most frequent activity of these ranks. Waiting ranks count only if all ranks wait."""
    busy = [phase or verb for verb, phase in doings if verb not in LED]
    busy = [name for name in busy if not name.startswith("wait")]
    return Counter(busy or ["wait"]).most_common(1)[0][0]
