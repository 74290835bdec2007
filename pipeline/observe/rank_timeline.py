"""Record what a rank does and when, as trace events in a file, and the share of its time that it waits.

    timeline = Timeline(about, components)      # every rank; `World.phase` calls `enter`
    timeline.write(folder)                      # a thread writes folder/timeline/rank00000.jsonl
    account = timeline.account()                # times since the previous call; sent with every reply to rank 0
    timeline.add_account(component, account)    # rank 0: adds the account of one or more ranks
    timeline.step_ended(step)                   # rank 0: returns {"idle/train": 0.2, ...} since the previous call

A file uses the JSON array format of Chrome's trace events ("Trace Event Format", Google, 2016), one event a line, without the
optional closing bracket; https://ui.perfetto.dev shows it. Its events are

    M    the first event: `args` has the rank, its component (under "realm"), its engine and its node
    X    an activity, which begins where the previous one ends: `name` is the verb, or "verb: phase", and `cat` its category;
         for merged spans `args` has their number and the seconds of each category
    i    rank 0 only: a step ended; `args` has its number

Times are microseconds since 1970, counted by a monotonic clock from the wall clock's time at the beginning, so they never jump.
The end of the file is rewritten every second with the current activity. As long as the activity does not change, the end is
rewritten only every (world size / 64) seconds, to spare a file system that thousands of ranks share. A killed rank loses its
last second.

Merging bounds the file's size. An interruption shorter than the resolution is merged into its span: an engine's 50 steps a
second are one span. The resolution is 10 ms and doubles with every 8 MB, so a file grows by at most 8 MB whenever the run's
length doubles.

A rank waits if it runs no verb, or is in a phase that begins with "wait", or if only environments work on its episodes. A rank
that waits for others inside a collective counts as busy. If train and generate ranks share GPUs, train ranks wait while
generate ranks work, and the other way round.

Left out: a rank's threads, and times on the GPU. `launch/timeline.py` merges the files. The cost is about 0.1% of a
CPU at 200 changes a second (`python -m tests.benchmarks.timeline_cost`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.observe.spans import RESOLUTION_S, WAITING, Merger, Span, category, us

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
QUIET_RANKS_PER_S = 64
"""Number of ranks of a run that rewrite an unchanged activity in the same second."""
DOUBLING_BYTES = 8 << 20
MOST_UNWRITTEN = 10_000
"""Maximum number of lines that are kept while the disk fails. Older lines are dropped."""
CLOSE_S = 5.0
"""Seconds that the end of a run waits for a hanging disk."""

Account = tuple[float, float]
"""(idle, total) seconds of one or more ranks."""


class Timeline:
    """Records the activities of a rank. Not thread-safe, except for its file."""

    def __init__(self, about: Mapping[str, Any], components: Mapping[str, tuple[int, ...]]):
        """Begin to record. about: {"rank", "realm": the component, "engine": its number or None, "node"}.

        components: name of the component -> its ranks.
        """
        self._rank = about["rank"]
        self._components = {name: ranks for name, ranks in components.items() if ranks}
        self._began = time.monotonic()
        self._about = {**about, "began": time.time()}
        self._now = (self._began, "join", "")  # (since, verb, phase)
        self._waited = 0.0
        self._environments = 0.0  # part of `_waited`: only environments worked
        self._reported: Account = (0.0, 0.0)  # idle and total seconds at the previous `account`
        self._accounts: dict[str, Account] | None = None  # by component since the last step; None before the first
        self._ended: deque[Event] = deque(maxlen=100_000)  # bounded, in case the writing thread hangs
        self._writer: Writer | None = None
        self._quiet = max(FLUSH_S, sum(map(len, self._components.values())) / QUIET_RANKS_PER_S)

    def enter(self, verb: str, phase: str) -> None:
        """Record that the rank's activity changes to a verb and a phase."""
        now = time.monotonic()
        since, old_verb, old_phase = self._now
        category_of_phase = category(old_verb, old_phase)
        if category_of_phase in WAITING:
            self._waited += now - since
        if category_of_phase == "environment":
            self._environments += now - since
        self._ended.append((since - self._began, now - self._began, old_verb, old_phase))
        self._now = (now, verb, phase)

    def account(self) -> Account:
        """Return the account of the time since the previous call, or since the beginning."""
        now = time.monotonic()
        since, verb, phase = self._now
        waited = self._waited + (now - since if category(verb, phase) in WAITING else 0.0)
        before, self._reported = self._reported, (waited, now - self._began)
        return self._reported[0] - before[0], self._reported[1] - before[1]

    def waited_s(self) -> tuple[float, float]:
        """Return (seconds that the rank has waited in this run, seconds of these in which only environments worked).

        Other threads may call this.
        """
        waited, environments = self._waited, self._environments
        since, verb, phase = self._now
        kind, lasts = category(verb, phase), time.monotonic() - since
        return waited + lasts * (kind in WAITING), environments + lasts * (kind == "environment")

    # ---- rank 0 -------------------------------------------------------------------------------------------------------------

    def add_account(self, component: str, account: Account) -> None:
        """Add an account of ranks of a component."""
        if self._accounts is not None:
            waited, total = self._accounts.get(component, (0.0, 0.0))
            self._accounts[component] = (waited + account[0], total + account[1])

    def step_ended(self, step: int) -> dict[str, float]:
        """Return the share of time that each component's ranks were idle since the previous call.

        A rank's share covers the time to its last reply; a rank that has not replied since the previous call has none. The
        first call returns {}.
        """
        self._ended.append((time.monotonic() - self._began, step))
        self.add_account(self._about["realm"], self.account())
        accounts, self._accounts = self._accounts or {}, {}
        return {
            f"idle/{name}": accounts[name][0] / accounts[name][1]
            for name in self._components
            if accounts.get(name, (0, 0))[1] > 0
        }

    # ---- the file -----------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write the file from now on, with the events recorded so far."""
        path = folder / "timeline" / f"rank{self._rank:05d}.jsonl"
        self._writer = Writer(path, self._about, self.take, self._quiet)
        self._writer.start()

    def close(self) -> None:
        """Write the rest of the file, if the disk accepts it."""
        if self._writer:
            self._writer.stop()

    def take(self) -> tuple[list[Event], Activity]:
        """Return (events that have ended since the previous call, the current activity)."""
        since, verb, phase = self._now  # read first: an activity that ends after this is taken next time
        ended = []
        with contextlib.suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        return ended, (since - self._began, time.monotonic() - self._began, verb, phase)


Activity = tuple[float, float, str, str]
"""(begin, end, verb, phase)."""

Event = Activity | tuple[float, int]
"""An activity, or (at, step): the end of a step."""


class Writer:
    """The thread that writes the file. If the disk fails, only the file is lost, and the loss is logged once."""

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        take: Callable[[], tuple[list[Event], Activity]],
        quiet: float = FLUSH_S,
    ):
        """Write to `path`. take: `Timeline.take`. quiet: seconds after which an unchanged activity is written again."""
        self._path = path
        self._take = take  # returns what ended and the current activity
        self._quiet = quiet
        self._written_until = -math.inf  # end of the current activity in the file
        self._merger = Merger()
        self._rank, self._zero = about["rank"], about["began"]
        self._lines = [f"[{_text(self._first(about))}"]  # final, but not written yet
        self._at = 0  # their offset in the file
        self._end = 0  # upper bound of the file's size
        self._file: int | None = None
        self._failing = False
        self._lost = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write the rest and end the thread, within CLOSE_S."""
        self._stopped.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_S):
            self.flush()
        self._quiet = 0.0
        self.flush()

    def flush(self) -> None:
        """Write what has been recorded since the previous call."""
        ended, under_way = self._take()
        if not ended and not self._lines and under_way[1] < self._written_until + self._quiet:
            return
        for event in ended:
            if len(event) == 2:
                self._lines.append(_text(self._step(*event)))
            else:
                self._lines += map(self._text, self._merger.take(Span.of(*event)))
        tail = [*self._merger.rest()]
        if not any(len(event) == 4 and event[0] >= under_way[0] for event in ended):
            tail.append(Span.of(*under_way))
        settled = "".join(self._lines).encode()
        try:
            self._put(settled + "".join(map(self._text, tail)).encode())
        except OSError as error:
            self._handle_write_error(error)
            return
        if self._failing:
            logger.warning("the timeline (%s) can be written again; %d lines are lost", self._path, self._lost)
            self._failing = False
        self._at += len(settled)
        self._lines = []
        self._written_until = under_way[1]
        self._merger.resolution = RESOLUTION_S * 2 ** (self._at // DOUBLING_BYTES)

    def _first(self, about: Mapping[str, Any]) -> dict[str, Any]:
        args = {"name": f"{about['realm']} rank {self._rank} on {about['node']}", **about}
        return {"ph": "M", "name": "process_name", "pid": self._rank, "tid": self._rank, "args": args}

    def _step(self, at: float, step: int) -> dict[str, Any]:
        fields = {"pid": self._rank, "tid": self._rank, "ts": us(self._zero + at)}
        return {"ph": "i", "name": f"step {step} ended", **fields, "s": "g", "args": {"step": step}}

    def _text(self, span: Span) -> str:
        return _text(span.event(self._rank, self._rank, self._zero))

    def _put(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            self._end = os.fstat(self._file).st_size
        at, unwritten = self._at, memoryview(data)
        self._end = max(self._end, at + len(unwritten))
        while unwritten:
            count = os.pwrite(self._file, unwritten, at)
            at, unwritten = at + count, unwritten[count:]
        if at < self._end:  # the previous tail was longer
            os.ftruncate(self._file, at)
            self._end = at

    def _handle_write_error(self, error: OSError) -> None:
        if not self._failing:
            self._failing, self._lost = True, 0
            logger.warning("the timeline (%s) cannot be written (%s); the run continues without it", self._path, error)
        about, lines = (self._lines[:1], self._lines[1:]) if self._at == 0 else ([], self._lines)
        self._lost += max(0, len(lines) - MOST_UNWRITTEN)
        self._lines = about + lines[-MOST_UNWRITTEN:]
        if self._file is not None:  # the handle may be stale
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def _text(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"
