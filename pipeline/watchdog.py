"""No silent hang. Every rank says regularly that it lives and what it does; a wait that goes on too long ends the run by name.

A thread on every rank sends heartbeats to the store of rank 0. Rank 0's thread reads them all and ends the run when
- a rank has been silent for `cluster.timeouts.silence` (killed, stopped, or its node is gone), or
- a verb has outlasted its own timeout: the ranks that have not replied are named with the phase they are in, or
- the world has not formed within `cluster.timeouts.join`.
Every other rank ends itself when rank 0's store does not answer. Ending is `os._exit`, since the main thread may be inside a
collective that never returns; the launcher then ends the rest of the job.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import msgspec

from pipeline.config import TimeoutsConfig
from pipeline.world import World

EXIT_STATUS = 124  # as timeout(1)


@dataclass(frozen=True)
class Failure:
    """What ended a run; the first one is kept in the run folder as failure.json."""

    rank: int
    realm: str
    host: str
    verb: str
    phase: str
    message: str

    @classmethod
    def here(cls, world: World, message: str) -> Failure:
        """This rank is to blame."""
        activity = world.activity
        return cls(world.rank, world.realm, world.place.node, activity.verb, activity.phase, message)

    def record(self, run_dir: Path) -> None:
        print(f"hetstep: {self.message}", file=sys.stderr, flush=True)
        try:
            with open(run_dir / "failure.json", "x") as file:
                json.dump(asdict(self), file)
        except FileExistsError:
            pass  # an earlier failure is nearer to the cause


class Beat(msgspec.Struct, array_like=True):
    count: int
    node: str
    verb: str
    phase: str
    seconds: float  # in this phase


@dataclass(frozen=True)
class Overdue:
    """A call that has outlasted its timeout."""

    verb: str
    timeout_s: float
    missing: list[int]


class Watchdog:
    """Runs until `stop`. `overdue` is asked on rank 0 for calls past their deadline."""

    def __init__(
        self,
        world: World,
        run_dir: Path,
        timeouts: TimeoutsConfig,
        overdue: Callable[[], Overdue | None] = lambda: None,
    ):
        self._world = world
        self._run_dir = run_dir
        self._silence_s = silence_s = timeouts.silence
        self._join_s = timeouts.join
        self._started = time.monotonic()
        self._overdue = overdue
        self._interval_s = min(1.0, silence_s / 10)
        self._stopped = threading.Event()
        self._store = world.store.clone()  # the main thread may sit in a blocking call on its own connection
        self._store.set_timeout(timedelta(seconds=silence_s))
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._beat(0)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(self._silence_s)

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(self._interval_s):
            count += 1
            try:
                self._beat(count)
                if self._world.rank == 0:
                    self._check()
            except Exception as error:  # the store is a C++ object: a lost peer shows as one of several error types
                if not self._stopped.is_set():
                    self._end(Failure.here(self._world, f"rank 0 (train), the coordinator, does not answer: {error}"))

    def _beat(self, count: int) -> None:
        world, activity = self._world, self._world.activity
        beat = Beat(count, world.place.node, activity.verb, activity.phase, time.monotonic() - activity.since)
        self._store.set(f"beat/{world.rank}", msgspec.msgpack.encode(beat))

    def _check(self) -> None:
        now = time.monotonic()
        values = self._store.multi_get([f"beat/{rank}" for rank in range(self._world.size)])
        for rank, value in enumerate(values):
            beat = msgspec.msgpack.decode(value, type=Beat)
            if rank not in self._heard or self._heard[rank][0].count != beat.count:
                self._heard[rank] = (beat, now)
        silent = [rank for rank, (_, heard) in self._heard.items() if now - heard > self._silence_s]
        if silent:
            self._blame(silent, f"not heard from for {self._silence_s:g} s (cluster.timeouts.silence)")
        if late := self._overdue():
            self._blame(late.missing, f"verb '{late.verb}' has not ended after {late.timeout_s:g} s")
        joining = [rank for rank, (beat, _) in self._heard.items() if beat.verb == "join"]
        if joining and now - self._started > self._join_s:
            self._blame(joining, f"the world has not formed after {self._join_s:g} s (cluster.timeouts.join)")

    def _blame(self, ranks: list[int], why: str) -> None:
        beats = {rank: self._heard[rank][0] for rank in ranks}
        names = "; ".join(
            f"{self._world.describe(rank)} on {beat.node}, in verb '{beat.verb}', phase '{beat.phase}'"
            for rank, beat in beats.items()
        )
        first = ranks[0]
        realm, beat = self._world.realms.name(first), beats[first]
        self._end(Failure(first, realm, beat.node, beat.verb, beat.phase, f"{why}: {names}"))

    def _end(self, failure: Failure) -> None:
        failure.record(self._run_dir)
        os._exit(EXIT_STATUS)
