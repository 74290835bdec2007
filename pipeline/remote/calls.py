"""Rank 0's end: it numbers calls, sends them, and sorts the answers to their futures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pipeline.remote.messages import INLINE, STOP, Envelope, decode, encode, follow, queue_of
from pipeline.remote.verbs import run, signature
from pipeline.watchdog import OfAnotherRank, Overdue
from pipeline.world import NEVER, World


class RemoteError(OfAnotherRank):
    """A verb raised on another rank."""


class Future:
    """The replies of one call."""

    def __init__(self, mailbox: Mailbox, verb: str, ranks: tuple[int, ...], timeout_s: float, reply: tuple[Any, bool]):
        self.verb = verb
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.sends: list = []  # bodies under way and their work handles
        self._mailbox = mailbox
        self._ranks = ranks
        self._kind, self.in_parts = reply
        self._replies: dict[int, Any] = {rank: [] for rank in ranks} if self.in_parts else {}
        self._ended: set[int] = set()
        self._fresh: list[tuple[int, Any]] = []

    @property
    def missing(self) -> list[int]:
        """The ranks that have not ended their answer."""
        return [rank for rank in self._ranks if rank not in self._ended]

    @property
    def suspects(self) -> list[int]:
        """Whom a late answer may be waiting for: of one in parts all ranks, as those that follow an engine's leader end their
        own at once, and may be what it waits for."""
        return list(self._ranks) if self.in_parts else self.missing

    @property
    def done(self) -> bool:
        return not self.missing

    def accept(self, envelope: Envelope, body: bytes) -> None:
        self.reply(envelope.rank, decode(body, self._kind), envelope.more)

    def reply(self, rank: int, reply: Any, more: bool = False) -> None:
        """What a rank has answered, or a part of it."""
        if self.in_parts:
            self._replies[rank] += reply
        else:
            self._replies[rank] = reply
        if reply or not self.in_parts:
            self._fresh.append((rank, reply))
        if not more:
            self._ended.add(rank)

    def take(self) -> list[tuple[int, Any]]:
        """(rank, its reply or a part of it) of all that came since this was called before. Does not wait. Parts that were taken
        are not in the result."""
        fresh, self._fresh = self._fresh, []
        if self.in_parts:
            self._replies |= {rank: [] for rank, _ in fresh}
        return fresh

    def result(self) -> list[Any]:
        """Wait for every rank; all that each has answered. Raises RemoteError if the verb raised on one."""
        while self.missing:
            self._mailbox.receive(f"wait for {self.verb}", self)
        return [self._replies[rank] for rank in self._ranks]


class Mailbox:
    """Rank 0's end: numbers calls, sends them, sorts the replies to their futures."""

    def __init__(self, world: World):
        self._world = world
        self._next = 0
        self._futures: dict[int, Future] = {}
        self._lock = threading.Lock()  # the watchdog reads the futures from its thread
        self._awaited: Future | None = None  # by rank 0; None: any
        self._waiting_since: float | None = None  # rank 0, for a message
        self._store = world.store.clone()
        self._store.set_timeout(NEVER)

    def open(self, verb: str, ranks: tuple[int, ...], timeout_s: float, reply: tuple[Any, bool]) -> tuple[int, Future]:
        """reply: its type, and whether it comes in parts."""
        with self._lock:
            call, self._next = self._next, self._next + 1
            self._futures[call] = future = Future(self, verb, ranks, timeout_s, reply)
        return call, future

    def send(self, call: int, verb: str, rank: int, body: bytes) -> None:
        follows = len(body) if len(body) > INLINE else 0
        envelope = Envelope(call, self._world.rank, verb, b"" if follows else body, min(self._futures), follows)
        self._store.queue_push(queue_of(rank), msgspec.msgpack.encode(envelope))
        if follows:
            tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            work = dist.isend(tensor, rank, group=self._world.spanning)
            self._futures[call].sends.append((tensor, work))

    def receive(self, phase: str, awaited: Future | None = None) -> None:
        """Take one message from the queue, waiting for it. awaited: the future it is wanted for, if it is for one.

        Raises RuntimeError where no call is open, so that none would ever come."""
        if not self._futures:
            raise RuntimeError(f"{phase}: no call is open that could be answered")
        self._awaited = awaited
        with self._world.phase(phase, verb="idle"):
            self._waiting_since = time.monotonic()
            message = self._store.queue_pop(queue_of(0))
            self._waiting_since = None
        self._sort(message)

    def poll(self) -> bool:
        """Take one message from the queue, if there is one."""
        try:
            message = self._store.queue_pop(queue_of(0), block=False)
        except dist.QueueEmptyError:
            return False
        self._sort(message)
        return True

    def _sort(self, message: bytes) -> None:
        envelope = msgspec.msgpack.decode(message, type=Envelope)
        self._world.timeline.heard(envelope.rank, envelope.account)
        if envelope.error:
            name = self._world.describe(envelope.rank)
            raise RemoteError(f"verb '{envelope.verb}' failed on {name}:\n{envelope.error}")
        body = follow(self._world, envelope)
        with self._lock:
            self._futures[envelope.call].accept(envelope, body)
        self.settle(envelope.call)

    def settle(self, call: int) -> None:
        """Forget the call if every rank has answered."""
        with self._lock:
            if self._futures[call].done:
                del self._futures[call]

    def overdue(self) -> Overdue | None:
        """Calls past their deadline. One that is answered in parts may take as long as it wants, and its parts may lie in the
        queue while rank 0 is busy: it is late when rank 0 has waited so long for it, or for any message at all."""
        now, since, awaited = time.monotonic(), self._waiting_since, self._awaited
        with self._lock:
            open_ = [future for future in self._futures.values() if future.missing]
        late = [future for future in open_ if not future.in_parts and now > future.deadline][:1]
        if not late and since is not None:
            waited_for = [future for future in open_ if future.in_parts and awaited in (None, future)]
            late = [future for future in waited_for if now > max(since + future.timeout_s, future.deadline)]
        if not late:
            return None
        return Overdue(late[0].verb, late[0].timeout_s, sorted({rank for future in late for rank in future.suspects}))


class Remote:
    """A realm as rank 0 sees it: each verb of its role is a method that returns a Future.

    `parts`, instead of the argument, is a list with one argument per rank. `role` is rank 0's own, if it is in the realm.
    """

    def __init__(self, mailbox: Mailbox, world: World, ranks: tuple[int, ...], kind: type, timeouts: Any, role: Any = None):
        self._mailbox = mailbox
        self._world = world
        self._ranks = ranks
        self._kind = kind
        self._timeouts = timeouts
        self._role = role

    def hear(self, block: bool) -> bool:
        """Take in one message, of any realm, into its future; False if there is none and it is not waited for."""
        if not block:
            return self._mailbox.poll()
        self._mailbox.receive(f"wait for {self._world.realms.name(self._ranks[0])}")
        return True

    def __getattr__(self, name: str) -> Callable[..., Future]:
        _, *reply = signature(self._kind, name)
        timeout_s = getattr(self._timeouts, getattr(self._kind, name).timeout)

        def call(argument: Any = None, *, parts: list[Any] | None = None) -> Future:
            number, future = self._mailbox.open(name, self._ranks, timeout_s, tuple(reply))
            shared = encode(argument) if parts is None else None
            for i, rank in enumerate(self._ranks):
                if rank != self._world.rank:
                    self._mailbox.send(number, name, rank, encode(parts[i]) if parts is not None else shared)
            if self._role is not None:
                own = argument if parts is None else parts[self._ranks.index(self._world.rank)]
                future.reply(self._world.rank, run(self._world, self._role, name, own))
            self._mailbox.settle(number)
            return future

        return call


def stop(world: World) -> None:
    """Tell every other rank that the run is over."""
    for rank in range(1, world.size):
        world.store.queue_push(queue_of(rank), msgspec.msgpack.encode(Envelope(-1, 0, STOP, b"")))
