"""Every other rank's end: verbs come, one after another, and answers go."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import msgspec

from pipeline.encoding import decode, encode
from pipeline.rpc.messages import (
    STOP,
    Envelope,
    Sending,
    as_tensor,
    digest,
    following,
    receive_body,
    route,
    send_body,
)
from pipeline.rpc.verbs import run, signature
from pipeline.store import messaging
from pipeline.world import World


@runtime_checkable
class BackgroundWorker(Protocol):
    """A role that goes on, between verbs, with what they began."""

    wakeup: threading.Event  # set here when a verb has come, and by the role itself when it need not wait any more

    def work(self, verb_waits: Callable[[], bool]) -> None:
        """Go on until the next verb is to be taken, which may not have come yet if there is nothing else to do."""

    def close(self) -> None:
        """The run is over."""


class _Inbox:
    """A rank's verbs. A thread fetches them, so that to look for one costs the store nothing."""

    def __init__(self, world: World, wakeup: threading.Event):
        self._store = world.store.nearest(world.info.node)
        self._rank = world.rank
        self._wakeup = wakeup
        self._come: queue.SimpleQueue[Envelope | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._fetch, name="inbox", daemon=True).start()

    def _fetch(self) -> None:
        try:
            self._store.send(messaging.Subscribe([self._rank]))
            verb = ""
            while verb != STOP:
                for message in self._store.next_messages():
                    envelope = msgspec.msgpack.decode(message, type=Envelope)
                    verb = envelope.verb
                    self._come.put(envelope)
                self._wakeup.set()
        except Exception as error:  # raised where the verb is awaited
            self._come.put(error)
            self._wakeup.set()

    def waits(self) -> bool:
        """Whether a verb has come."""
        return not self._come.empty()

    def take(self) -> Envelope:
        come = self._come.get()
        if isinstance(come, Exception):
            raise come
        return come


class _Outbox:
    """A rank's answers, and what it hands on to others."""

    def __init__(self, world: World):
        self._world = world
        self._store = world.store.nearest(world.info.node)
        self._sends: list[tuple[int, Sending]] = []  # by call: bodies under way, alive until rank 0 has all answers

    def settle(self, settled: int) -> None:
        self._sends = [send for send in self._sends if send[0] >= settled]

    def put(self, call: int, verb: str, reply: Any, more: bool = False, error: str = "") -> None:
        body = encode(reply)
        follows = following(body)
        account = self._world.timeline.account()
        inline, ranks = b"" if follows else body, [self._world.rank]
        answer = messaging.Answer(call, ranks, verb, inline, follows, error, more, account, digest(body))
        self._store.send(messaging.Answers([answer]))
        if follows:  # not waited for: rank 0 may first want this rank inside a collective
            self._sends.append((call, send_body(self._world, as_tensor(body), call, 0)))

    def body(self, envelope: Envelope) -> bytes:
        """Return what a verb comes with, and hand a large one on to those that have it from here."""
        if not envelope.follows:
            return envelope.body
        source, onward = route(envelope.ranks, self._world.rank)
        body = receive_body(self._world, envelope.follows, envelope.digest, envelope.call, source)
        self._sends += [(envelope.call, send_body(self._world, body, envelope.call, rank)) for rank in onward]
        return body.numpy().tobytes()

    @contextmanager
    def told(self, call: int = -1) -> Iterator[None]:
        """An error is reported to rank 0, then raised."""
        try:
            yield
        except Exception:
            self.put(call, self._world.activity.verb, None, error=traceback.format_exc())
            raise


def serve(world: World, role: Any) -> None:
    """Run verbs until rank 0 says stop. A verb that raises is reported to rank 0, then raised here."""
    working = role if isinstance(role, BackgroundWorker) else None
    inbox, outbox = _Inbox(world, working.wakeup if working else threading.Event()), _Outbox(world)
    while True:
        with world.phase("", verb="idle"):
            if working:
                with outbox.told():
                    working.work(inbox.waits)
            envelope = inbox.take()
        if envelope.verb == STOP:
            break
        outbox.settle(envelope.settled)
        with outbox.told(envelope.call):
            _serve(world, role, envelope, outbox)
    if working:
        working.close()


def _serve(world: World, role: Any, envelope: Envelope, outbox: _Outbox) -> None:
    call, name = envelope.call, envelope.verb
    with world.phase("receive", verb=name):
        argument, _, in_parts = signature(type(role), name)
        message = decode(outbox.body(envelope), argument)
    reply = run(world, role, name, message)
    if in_parts:
        reply.send_by(lambda items, more: outbox.put(call, name, items, more))
    else:
        outbox.put(call, name, reply)
