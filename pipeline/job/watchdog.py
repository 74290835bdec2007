"""End a run that hangs, name the rank or call that is late, and record the first failure.

Every rank sends heartbeats to the store beside rank 0, or to its node's relay, and reads there whether a rank has failed. Rank
0 reads all heartbeats and ends the run when
- a rank is lost: its connection to the store ends (killed, out of memory, crashed in a library), or
- a rank has been silent for `cluster.timeouts.silence` (stopped, or its node is lost; ten times that while it loads), or
- a verb has exceeded its timeout: the ranks that have not replied are named with their phases, or
- the world has not formed within `cluster.timeouts.join`.
Every other rank ends itself when rank 0 is silent or the store is lost. It ends by `os._exit`, since the main thread may be
inside a collective that never returns; the launcher then ends the rest of the job.

The rank that fails first writes failure.json, with its traceback, and reports itself in the store. All others end without
reporting a failure, because their broken connections only follow from the first failure. An error that may be such an echo
is reported only if no other rank has been named after ECHO_S.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from pipeline.config import TimeoutsConfig
from pipeline.files.storage import listed
from pipeline.job import signals
from pipeline.job.world import Activity, RankInfo, WorkerGroups, World, heartbeat_interval_s
from pipeline.node.memory_kills import MemoryKills
from pipeline.observe.warning_file import MEMORY_CHECKS, last_warning
from pipeline.recipe.secrets import redact
from pipeline.store.relay import STORE_GONE

logger = logging.getLogger(__name__)

EXIT_STATUS = 124  # as timeout(1)
EXIT_WITH_ANOTHER = 123  # another rank failed first
SHORTEST_S = 0.05  # between two heartbeats
ECHO_S = 5.0
LAST_WORD_S = 2.0  # how long rank 0's failure.json may lag behind its end, on a shared file system
LOADING = ("join", "check nodes", "setup")
"""Verbs in which ranks import libraries and start CUDA. The interpreter's lock is held while a shared library is loaded, so no
thread can send a heartbeat; from a busy file system, by all ranks of a node at once, that may take minutes."""
LOADING_PATIENCE = 10.0  # times cluster.timeouts.silence
HELD_S = 2.0  # a longer delay of `_judge`, beyond its interval, shows that this process was held up
TERMINATING_S = 10.0  # of silence after SIGTERM, which may mean that a rank is lost and time is short
FAILED = "failed"  # in the store: the rank that failed first

BROKEN = re.compile(
    r"connection\b.*\b(closed|reset|refused|aborted|lost)|broken pipe|socket closed|remote process exited", re.I
)
"""Errors of gloo, NCCL and sockets when the process at the other end is lost."""


class PeerError(RuntimeError):
    """A failure on another rank, which that rank reports itself."""


def may_be_echo(error: BaseException | None) -> bool:
    """Return whether an error may be only a consequence of another rank's end, by the types and texts of it and its causes."""
    seen_ids = set()  # a chain of causes may lead back to its start
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        if isinstance(error, PeerError | dist.DistError | ConnectionError) or BROKEN.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Failure:
    """A failure that ended a run. The first failure is stored as failure.json in the attempt's folder."""

    rank: int
    component: str
    host: str
    verb: str
    phase: str
    message: str
    traceback: str = ""  # empty if the rank did not raise

    @classmethod
    def of_this_rank(cls, world: World, message: str) -> Failure:
        """Return a failure of this rank, without a traceback."""
        activity = world.activity
        return cls(world.rank, world.component, world.info.node, activity.verb, activity.phase, message)

    @classmethod
    def of(cls, error: BaseException, info: RankInfo, workers: WorkerGroups, activity: Activity) -> Failure:
        """Return the failure of a rank that raised `error`."""
        component = workers.name(info.rank)
        message = f"rank {info.rank} ({component}): {type(error).__name__}: {error}"
        location = (info.rank, component, info.node, activity.verb, activity.phase)
        return cls(*location, message, "".join(traceback.format_exception(error)))

    def _record(self) -> dict[str, Any]:
        """Return the content of failure.json. launch/executors/verdict.sh reads `rank` and `realm`, which come first."""
        fields = asdict(self)
        return {"rank": fields.pop("rank"), "realm": fields.pop("component"), **fields}

    def record(self, folder: Path) -> bool:
        """Write failure.json and log the failure; return whether it is the first failure.

        A failure that cannot be written is logged and counts as the first.
        """
        temporary = folder / f"failure.{self.rank}-{os.getpid()}.tmp"
        try:
            temporary.write_text(redact(json.dumps(self._record())))
            os.link(temporary, folder / "failure.json")  # atomic: the launcher may end this process at any moment
        except FileExistsError:
            return False  # the first failure is the cause
        except OSError as error:
            logger.error("failure.json cannot be written: %s", error)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        logger.error(self.message)
        return True


class Heartbeat(msgspec.Struct, array_like=True):
    """A rank's heartbeat: its node and activity. `count` is the number of the heartbeat."""

    count: int
    node: str
    verb: str
    phase: str
    sample: bytes = b""  # of the resource monitor, which encodes it


@dataclass(frozen=True)
class Overdue:
    """A call that has exceeded its timeout, and the ranks it waits for."""

    verb: str
    timeout_s: float
    missing: list[int]


class Watchdog:
    """Watches the ranks until `stop` or `fail`. overdue: a function that returns, on rank 0, a call past its deadline.

    One thread exchanges heartbeats with the store and may hang with it. Another thread decides whether the run has failed.
    """

    def __init__(
        self,
        world: World,
        timeouts: TimeoutsConfig,
        overdue: Callable[[], Overdue | None] = lambda: None,
    ):
        self._world = world
        self.sample: Callable[[], bytes] = bytes  # returns the rank's latest sample, to send with each heartbeat
        self._name = world.describe(world.rank)
        self._silence_s = timeouts.silence
        self._join_s = timeouts.join
        self._overdue = overdue
        self._interval_s = heartbeat_interval_s(world.size, timeouts.silence)
        self._stopped = threading.Event()
        self._news = threading.Event()  # for `_judge`
        self._watched = range(world.size) if world.rank == 0 else range(1)
        self._store = world.store.nearest(world.info.node)  # the main thread may block on its own connection
        self._store.set_on_disconnect(f"lost/{world.rank}")
        self._answered = time.monotonic()
        self._joining_since: float | None = None  # when a rank was first seen in verb 'join'
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}  # (latest heartbeat, its time) of each watched rank
        self._lost_ranks: list[int] = []
        self._failed_rank: int | None = None  # a rank that reported a failure
        self._store_error = ""  # why the store is lost; "": it is not
        self._kills = MemoryKills()

    def start(self) -> None:
        """Start the two threads."""
        for loop in (self._exchange, self._judge):
            threading.Thread(target=loop, name=f"watchdog{loop.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: from now on this rank ends in order."""
        self._stopped.set()
        self._store.set_on_disconnect("")

    def activities(self) -> dict[int, tuple[str, str]]:
        """Return the (verb, phase) of each watched rank that has sent a heartbeat."""
        return {rank: (beat.verb, beat.phase) for rank, (beat, _) in dict(self._heartbeats).items()}

    def samples(self) -> dict[int, bytes]:
        """Return the latest sample of each watched rank that has sent a heartbeat."""
        return {rank: beat.sample for rank, (beat, _) in dict(self._heartbeats).items()}

    def fail(self, error: BaseException) -> None:
        """Report the error that ended the main thread. Does not return if another rank has failed first."""
        echo_until = time.monotonic() + (ECHO_S if may_be_echo(error) else 0)
        while time.monotonic() < echo_until or self._store_error:  # `_judge` ends this process if another rank is to blame
            time.sleep(0.1)
        self._stopped.set()
        world = self._world
        if not Failure.of(error, world.info, world.workers, world.activity).record(world.info.folder):
            self._end_quietly(f"an earlier failure; the error of this rank is {type(error).__name__}: {error}")
        self._report_failure(world.rank)

    # ---- the store ----------------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        world, watched = self._world, self._watched
        keys = [FAILED, *(f"beat/{rank}" for rank in watched), *(f"lost/{rank}" for rank in watched)]
        for count in itertools.count():
            activity = world.activity
            beat = Heartbeat(count, world.info.node, activity.verb, activity.phase, self.sample())
            try:
                failed_rank, *values = self._store.exchange(f"beat/{world.rank}", msgspec.msgpack.encode(beat), keys)
            except dist.DistError as error:
                self._store_error = str(error)  # `_judge` reads it, unless the run is over
                self._news.set()
                return
            self._answered = time.monotonic()
            self._update_heartbeats(values[: len(watched)])
            disconnects = zip(watched, values[len(watched) :], strict=True)
            self._lost_ranks = [rank for rank, disconnect in disconnects if disconnect is not None]
            self._failed_rank = None if failed_rank is None else int(failed_rank)
            if self._lost_ranks or self._failed_rank is not None:
                self._news.set()
            if self._stopped.wait(SHORTEST_S):
                return
            world.activity_changed.wait(self._interval_s)
            world.activity_changed.clear()

    def _update_heartbeats(self, beats: list[bytes | None]) -> None:
        for rank, value in zip(self._watched, beats, strict=True):
            if value is not None:
                beat = msgspec.msgpack.decode(value, type=Heartbeat)
                if rank not in self._heartbeats or self._heartbeats[rank][0].count != beat.count:
                    self._heartbeats[rank] = (beat, self._answered)

    def _report_failure(self, rank: int) -> None:
        """Report in the store that `rank` has failed. Rank 0 then waits until others can have read it before the store ends."""
        try:
            store = self._world.store.clone(ECHO_S)  # a connection without a blocked request
            store.compare_set(FAILED, "", str(rank))
        except (dist.DistError, OSError):
            return  # ranks notice the lost store and read failure.json
        if self._world.rank == 0:
            time.sleep(2 * self._interval_s)

    # ---- judging ------------------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        last_judged = time.monotonic()
        while True:
            self._news.wait(self._interval_s)
            if self._stopped.is_set():
                return
            now = time.monotonic()
            if now - last_judged > self._interval_s + HELD_S:
                self._restart_clocks(now)
            last_judged = now
            if self._failed_rank is not None:
                self._end_quietly(f"the failure of {self._world.describe(self._failed_rank)}")
            if self._store_error:
                self._end_without_store()
            if self._lost_ranks:
                self._blame(self._lost_ranks, self._describe_death(self._lost_ranks[0]))
            heartbeats = dict(self._heartbeats)  # a copy: the other thread adds ranks
            self._judge_silence(heartbeats, now)
            if late := self._overdue():
                self._blame(late.missing, f"verb '{late.verb}' has not ended after {late.timeout_s:g} s")
            joining = [rank for rank, (beat, _) in heartbeats.items() if beat.verb == "join"]
            joining_since = self._joining_since = (self._joining_since or now) if joining else None
            if self._world.rank == 0 and joining_since and now - joining_since > self._join_s:
                self._blame(joining, f"the world has not formed after {self._join_s:g} s (cluster.timeouts.join)")

    def _restart_clocks(self, now: float) -> None:
        """Count the silence of all ranks from `now`: this process was stopped or held by the GIL, and read no heartbeats."""
        self._answered = now
        for rank, (beat, _) in dict(self._heartbeats).items():
            self._heartbeats[rank] = (beat, now)

    def _judge_silence(self, heartbeats: dict[int, tuple[Heartbeat, float]], now: float) -> None:
        silence_s, key = self._patience(self._world.activity.verb)
        rank_0 = self._world.describe(0)
        if now - self._answered > silence_s:
            respondent = f"the relay of {self._world.info.node}" if self._world.store.relay else f"the store beside {rank_0}"
            self._end(Failure.of_this_rank(self._world, self._no_answer(silence_s, key, respondent)))
        silent: dict[tuple[float, str], list[int]] = {}  # by (allowed seconds, reason)
        for rank, (beat, received) in heartbeats.items():
            silence_s, key = self._patience(beat.verb)
            if now - received > silence_s:
                silent.setdefault((silence_s, key), []).append(rank)
        for (silence_s, key), ranks in silent.items():
            if self._world.rank:
                self._end(Failure.of_this_rank(self._world, self._no_answer(silence_s, key, f"{rank_0}, the coordinator,")))
            self._blame(ranks, f"not heard from for {silence_s:g} s ({key})")

    def _patience(self, verb: str) -> tuple[float, str]:
        """Return (the seconds of silence that are allowed in this verb, the reason for them)."""
        if signals.terminating() and self._silence_s > TERMINATING_S:
            return TERMINATING_S, "after SIGTERM"
        if verb in LOADING:
            return LOADING_PATIENCE * self._silence_s, f"{LOADING_PATIENCE:g} times cluster.timeouts.silence, as it was loading"
        return self._silence_s, "cluster.timeouts.silence"

    def _no_answer(self, silence_s: float, key: str, respondent: str) -> str:
        activity = self._world.activity
        return (
            f"{respondent} has not answered for {silence_s:g} s ({key}): {self._name} gives up in verb '{activity.verb}',"
            f" phase '{activity.phase}'"
        )

    def _blame(self, ranks: list[int], reason: str) -> None:
        unheard = Heartbeat(0, "an unknown node", "join", "")
        beats = {rank: self._heartbeats[rank][0] if rank in self._heartbeats else unheard for rank in ranks}
        names = "; ".join(
            f"{self._world.describe(rank)} on {beat.node}, in verb '{beat.verb}', phase '{beat.phase}'"
            for rank, beat in beats.items()
        )
        first_rank = ranks[0]
        component, beat = self._world.workers.name(first_rank), beats[first_rank]
        self._end(Failure(first_rank, component, beat.node, beat.verb, beat.phase, f"{reason}: {names}"))

    # ---- why a process has died ---------------------------------------------------------------------------------------------

    def _describe_death(self, rank: int) -> str:
        """Return a description of a rank's death: the kernel's record, and the last sample and warning about memory."""
        node = self._heartbeats[rank][0].node if rank in self._heartbeats else ""
        record = self._kills.record() if node == self._world.info.node else ""
        causes = f"({record})" if record else "(killed, out of memory, or crashed in a library)"
        return "; ".join([f"died without an error message {causes}", *self._describe_memory(rank, node)])

    def _describe_memory(self, rank: int, node: str) -> Iterator[str]:
        """Yield the last sample of a lost rank's memory, and the last warning about its node's memory."""
        with contextlib.suppress(Exception):  # the message is complete without it
            decode = msgspec.msgpack.Decoder(dict[str, float]).decode
            beats = [beat for beat, _ in dict(self._heartbeats).values() if beat.node == node and beat.sample]
            last_beat = self._heartbeats[rank][0] if rank in self._heartbeats else None
            sample = decode(last_beat.sample) if last_beat and last_beat.sample else {}
            full = max((decode(beat.sample).get("node_memory", 0.0) for beat in beats), default=0.0)
            if "rss_gb" in sample:
                yield f"its last sample: {sample['rss_gb']:.3g} GB in its process, {node}'s host memory {full:.1%} full"
        if warning := last_warning(self._world.info.folder, MEMORY_CHECKS, node):
            yield f"the last warning about memory, after step {warning['step']}: {warning['message']}"

    # ---- ending -------------------------------------------------------------------------------------------------------------

    def _end(self, failure: Failure) -> None:
        if not failure.record(self._world.info.folder):
            self._end_quietly("an earlier failure")
        self._report_failure(failure.rank)
        os._exit(EXIT_STATUS)

    def _end_quietly(self, cause: str) -> None:
        logger.warning("%s ends because of %s", self._name, cause)
        if self._world.rank == 0:
            time.sleep(2 * self._interval_s)  # as in `_report_failure`
        os._exit(EXIT_WITH_ANOTHER)

    def _end_without_store(self) -> None:
        """End with a failure that says whether rank 0, the store's process or this node's relay has cut off this rank.

        Rank 0 knows how the store's process ended. Other ranks first wait for rank 0's failure: when rank 0 is killed the store
        ends, and each relay with it. The relay is the cause only if the store still answers.
        """
        if process := self._world.store.process:
            time.sleep(0.1)  # the process ends just after its connections
            status = process.poll()
            message = f"the store's process beside {self._world.describe(0)} has ended (status {status}): {self._store_error}"
            self._end(Failure.of_this_rank(self._world, message))
        if process := self._world.store.relay_process:
            time.sleep(0.1)
            status = process.poll()
            if status not in (None, STORE_GONE) and self._store_answers():
                message = f"the relay's process beside {self._name} has ended (status {status})"
                self._end(Failure.of_this_rank(self._world, message))
        deadline = time.monotonic() + LAST_WORD_S
        while time.monotonic() < deadline:
            if listed(self._world.info.folder / "failure.json"):
                self._end_quietly("an earlier failure")
            time.sleep(0.1)
        if self._world.store.relay and self._store_answers():
            self._end(Failure.of_this_rank(self._world, f"the relay of {self._world.info.node} is gone: {self._store_error}"))
        rank_0 = self._heartbeats[0][0] if 0 in self._heartbeats else Heartbeat(0, "an unknown node", "join", "")
        record = self._kills.record() if rank_0.node == self._world.info.node else ""
        end = (
            f"{self._world.describe(0)}, the coordinator, on {rank_0.node} is gone, and the store with it: {self._store_error}"
        )
        message = "; ".join(filter(None, [end, record, *self._describe_memory(0, rank_0.node)]))
        self._end(Failure(0, self._world.workers.name(0), rank_0.node, rank_0.verb, rank_0.phase, message))

    def _store_answers(self) -> bool:
        """Return whether the store accepts a new connection from this rank."""
        try:
            self._world.store.clone(LAST_WORD_S)
        except (dist.DistError, OSError):
            return False
        return True
