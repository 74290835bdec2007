"""The serving end of RPC, on every rank but 0: it takes calls one after another and sends their replies."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import msgspec

from pipeline.files.encoding import decode, encode
from pipeline.job.world import World
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


@runtime_checkable
class BackgroundRole(Protocol):
    """A role that continues work between verbs."""

    wakeup: threading.Event  # set when a verb has arrived; the role sets it when it has work

    def work(self, verb_waits: Callable[[], bool]) -> None:
        """Work until a verb has arrived or nothing is left to do. verb_waits: returns whether a verb has arrived."""

    def close(self) -> None:
        """Release resources at the end of the run."""


class _Inbox:
    """A rank's calls. A thread fetches them, so that checking for a call costs no request."""

    def __init__(self, world: World, wakeup: threading.Event):
        self._store = world.store.nearest(world.info.node)
        self._rank = world.rank
        self._wakeup = wakeup
        self._arrived: queue.SimpleQueue[Envelope | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._fetch, name="inbox", daemon=True).start()

    def _fetch(self) -> None:
        try:
            self._store.send(messaging.Subscribe([self._rank]))
            verb = ""
            while verb != STOP:
                for message in self._store.next_messages():
                    envelope = msgspec.msgpack.decode(message, type=Envelope)
                    verb = envelope.verb
                    self._arrived.put(envelope)
                self._wakeup.set()
        except Exception as error:  # `take` raises it
            self._arrived.put(error)
            self._wakeup.set()

    def waits(self) -> bool:
        """Return whether a call has arrived."""
        return not self._arrived.empty()

    def take(self) -> Envelope:
        arrived = self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived


class _Outbox:
    """A rank's replies, and the bodies that it forwards."""

    def __init__(self, world: World):
        self._world = world
        self._store = world.store.nearest(world.info.node)
        self._sends: list[tuple[int, Sending]] = []  # (call, body in flight), kept until rank 0 has all answers

    def settle(self, settled: int) -> None:
        self._sends = [send for send in self._sends if send[0] >= settled]

    def put(self, call: int, verb: str, reply: Any, more: bool = False, error: str = "") -> None:
        body = encode(reply)
        follows = following(body)
        account = self._world.timeline.account()
        inline, ranks = b"" if follows else body, [self._world.rank]
        answer = messaging.VerbReply(call, ranks, verb, inline, follows, error, more, account, digest(body))
        self._store.send(messaging.Answers([answer]))
        if follows:  # do not wait: rank 0 may need this rank in a collective first
            self._sends.append((call, send_body(self._world, as_tensor(body), call, 0)))

    def body(self, envelope: Envelope) -> bytes:
        """Return a call's body, and forward a large one to the next ranks."""
        if not envelope.follows:
            return envelope.body
        source, onward = route(envelope.ranks, self._world.rank)
        body = receive_body(self._world, envelope.follows, envelope.digest, envelope.call, source)
        self._sends += [(envelope.call, send_body(self._world, body, envelope.call, rank)) for rank in onward]
        return body.numpy().tobytes()

    @contextmanager
    def reporting_errors(self, call: int = -1) -> Iterator[None]:
        """Report an error of the block to rank 0, then raise it."""
        try:
            yield
        except Exception:
            self.put(call, self._world.activity.verb, None, error=traceback.format_exc())
            raise


def serve(world: World, role: Any) -> None:
    """Run verbs until rank 0 stops the run. An error of a verb is reported to rank 0, then raised here."""
    working = role if isinstance(role, BackgroundRole) else None
    inbox, outbox = _Inbox(world, working.wakeup if working else threading.Event()), _Outbox(world)
    while True:
        with world.phase("", verb="idle"):
            if working:
                with outbox.reporting_errors():
                    working.work(inbox.waits)
            envelope = inbox.take()
        if envelope.verb == STOP:
            break
        outbox.settle(envelope.settled)
        with outbox.reporting_errors(envelope.call):
            _serve(world, role, envelope, outbox)
    if working:
        working.close()


def _serve(world: World, role: Any, envelope: Envelope, outbox: _Outbox) -> None:
    call, name = envelope.call, envelope.verb
    with world.phase("receive", verb=name):
        verb = signature(getattr(type(role), name))
        message = decode(outbox.body(envelope), verb.argument)
    reply = run(world, role, name, message)
    if verb.in_parts:
        reply.send_by(lambda items, more: outbox.put(call, name, items, more))
    else:
        outbox.put(call, name, reply)
