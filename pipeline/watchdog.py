"""No silent hang. Every rank says regularly that it lives and what it does; a wait that goes on too long ends the run by name.

Every rank sends heartbeats to the store of rank 0. Rank 0 reads them all and ends the run when
- a rank has been silent for `cluster.timeouts.silence` (killed, stopped, or its node is gone), or
- a verb has outlasted its own timeout: the ranks that have not replied are named with the phase they are in, or
- the world has not formed within `cluster.timeouts.join`.
Every other rank ends itself when rank 0's store does not answer. Ending is `os._exit`, since the main thread may be inside a
collective that never returns; the launcher then ends the rest of the job.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from pipeline.config import TimeoutsConfig
from pipeline.world import World

EXIT_STATUS = 124  # as timeout(1)
SHORTEST_S = 0.05  # between two beats


@dataclass(frozen=True)
class Failure:
    """What ended a run; the first one is kept in the attempt's folder as failure.json."""

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

    def record(self, folder: Path) -> None:
        print(f"hetstep: {self.message}", file=sys.stderr, flush=True)
        beside = folder / f"failure.{self.rank}-{os.getpid()}.tmp"
        beside.write_text(json.dumps(asdict(self)))
        try:
            os.link(beside, folder / "failure.json")  # whole, or not at all: the launcher may end this process any moment
        except FileExistsError:
            pass  # an earlier failure is nearer to the cause
        beside.unlink()


class Beat(msgspec.Struct, array_like=True):
    count: int
    node: str
    verb: str
    phase: str


@dataclass(frozen=True)
class Overdue:
    """A call that has outlasted its timeout."""

    verb: str
    timeout_s: float
    missing: list[int]


class Watchdog:
    """Runs until `stop`. `overdue` is asked on rank 0 for calls past their deadline.

    Two threads: one exchanges beats with the store, and may be stuck there for ever when rank 0 is stopped; the other judges.
    """

    def __init__(
        self,
        world: World,
        timeouts: TimeoutsConfig,
        overdue: Callable[[], Overdue | None] = lambda: None,
    ):
        self._world = world
        self._silence_s = timeouts.silence
        self._join_s = timeouts.join
        self._overdue = overdue
        self._interval_s = min(1.0, timeouts.silence / 10)
        self._stopped = threading.Event()
        self._store = world.store.clone()  # the main thread may sit in a blocking call on its own connection
        self._started = self._answered = time.monotonic()
        self._heard: dict[int, tuple[Beat, float]] = {}  # on rank 0: each rank's newest beat, and when it came

    def start(self) -> None:
        for loop in (self._exchange, self._judge):
            threading.Thread(target=loop, name=f"watchdog{loop.__name__}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _exchange(self) -> None:
        for count in itertools.count():
            world, activity = self._world, self._world.activity
            beat = Beat(count, world.place.node, activity.verb, activity.phase)
            try:
                self._store.set(f"beat/{world.rank}", msgspec.msgpack.encode(beat))
                self._store.check([f"beat/{world.rank}"])  # setting waits for no answer
                if world.rank == 0:
                    self._listen()
            except dist.DistError:
                return  # `_judge` notices, unless the run is over
            self._answered = time.monotonic()
            if self._stopped.wait(SHORTEST_S):
                return
            world.activity_changed.wait(self._interval_s)
            world.activity_changed.clear()

    def _listen(self) -> None:
        now = time.monotonic()
        here = [r for r in range(self._world.size) if r in self._heard or self._store.check([f"beat/{r}"])]
        for rank, value in zip(here, self._store.multi_get([f"beat/{rank}" for rank in here]), strict=True):
            beat = msgspec.msgpack.decode(value, type=Beat)
            if rank not in self._heard or self._heard[rank][0].count != beat.count:
                self._heard[rank] = (beat, now)

    def _judge(self) -> None:
        while not self._stopped.wait(self._interval_s):
            heard, now = dict(self._heard), time.monotonic()  # a copy: the other thread adds ranks as they come
            if now - self._answered > self._silence_s:
                self._end(
                    Failure.here(
                        self._world,
                        f"rank 0 (train), the coordinator, does not answer since {self._silence_s:g} s"
                        f" (cluster.timeouts.silence): {self._world.describe(self._world.rank)} gives up in verb"
                        f" '{self._world.activity.verb}', phase '{self._world.activity.phase}'",
                    )
                )
            if silent := [rank for rank, (_, last) in heard.items() if now - last > self._silence_s]:
                self._blame(silent, f"not heard from for {self._silence_s:g} s (cluster.timeouts.silence)")
            if late := self._overdue():
                self._blame(late.missing, f"verb '{late.verb}' has not ended after {late.timeout_s:g} s")
            joining = [rank for rank, (beat, _) in heard.items() if beat.verb == "join"]
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
        failure.record(self._world.place.folder)
        os._exit(EXIT_STATUS)
