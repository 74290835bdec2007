"""Rank 0 calls verbs on a realm; every other rank serves them.

    step = train.step()            # a Future; rank 0's own share runs at once, in place
    replies = step.result()        # one reply per rank of the realm, in rank order

A verb is a method of a role (`pipeline/roles/`) marked with @verb; it takes at most one argument. Arguments and replies are
msgpack messages, typed by the method's annotations, with numpy arrays as raw bytes: never a pickle, because the ports of the
process groups are open to everyone on the cluster. Small messages go through the queue that each rank has in rank 0's store; a
body above `INLINE` bytes follows its message over the spanning group.

There are no timeouts here: `overdue` tells the watchdog which calls are late and whose reply is missing.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipeline.watchdog import OfAnotherRank, Overdue
from pipeline.world import NEVER, World

INLINE = 1 << 20  # bytes; the store refuses messages above 8 MiB
STOP = "stop"


class RemoteError(OfAnotherRank):
    """A verb raised on another rank."""


class Envelope(msgspec.Struct, array_like=True):
    """What travels through the store."""

    call: int
    rank: int  # the sender's
    verb: str
    body: bytes  # empty if it follows over the spanning group
    settled: int = 0  # rank 0 has taken the replies to all calls below this number
    follows: int = 0  # bytes that follow
    error: str = ""  # the traceback, instead of a reply


# ---- messages ---------------------------------------------------------------------------------------------------------


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(body: bytes, kind: Any) -> Any:
    """Raises msgspec.ValidationError if the body is not a `kind`."""
    return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    raise NotImplementedError(f"a {kind.__name__} cannot be received")


# ---- verbs ------------------------------------------------------------------------------------------------------------


def verb(timeout: str) -> Callable[[Callable], Callable]:
    """Mark a role's method as callable from rank 0; `timeout` is the key under `cluster.timeouts` that bounds it."""

    def mark(method: Callable) -> Callable:
        method.timeout = timeout
        return method

    return mark


def _signature(role: type, name: str) -> tuple[Any, Any]:
    """(type of the argument or None, type of the reply) of a verb. Raises AttributeError if it is none."""
    method = getattr(role, name)
    if not hasattr(method, "timeout"):
        raise AttributeError(f"{role.__name__}.{name} is not a verb")
    hints = get_type_hints(method)
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    return (hints[parameters[0]] if parameters else type(None)), hints.get("return", type(None))


# ---- rank 0 -----------------------------------------------------------------------------------------------------------


class Future:
    """The replies of one call."""

    def __init__(self, mailbox: Mailbox, call: int, verb: str, ranks: tuple[int, ...], timeout_s: float, reply: Any):
        self.verb = verb
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.replies: dict[int, Any] = {}
        self.sends: list = []  # bodies under way and their work handles
        self._mailbox = mailbox
        self._call = call
        self._ranks = ranks
        self._reply = reply

    @property
    def missing(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self.replies]

    def accept(self, rank: int, body: bytes) -> None:
        self.replies[rank] = decode(body, self._reply)

    def result(self) -> list[Any]:
        """Wait for every rank. Raises RemoteError if the verb raised on one."""
        while self.missing:
            self._mailbox.receive()
        self._mailbox.forget(self._call)
        return [self.replies[rank] for rank in self._ranks]


class Mailbox:
    """Rank 0's end: numbers calls, sends them, sorts the replies to their futures."""

    def __init__(self, world: World):
        self._world = world
        self._next = 0
        self._futures: dict[int, Future] = {}
        self._lock = threading.Lock()  # the watchdog reads the futures from its thread
        self._store = world.store.clone()
        self._store.set_timeout(NEVER)

    def open(self, verb: str, ranks: tuple[int, ...], timeout_s: float, reply: Any) -> tuple[int, Future]:
        with self._lock:
            call, self._next = self._next, self._next + 1
            self._futures[call] = future = Future(self, call, verb, ranks, timeout_s, reply)
        return call, future

    def send(self, call: int, verb: str, rank: int, body: bytes) -> None:
        follows = len(body) if len(body) > INLINE else 0
        envelope = Envelope(call, self._world.rank, verb, b"" if follows else body, min(self._futures), follows)
        self._store.queue_push(_queue(rank), msgspec.msgpack.encode(envelope))
        if follows:
            tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            work = dist.isend(tensor, rank, group=self._world.spanning)
            self._futures[call].sends.append((tensor, work))

    def receive(self) -> None:
        """Take one reply from the queue, waiting for it."""
        envelope = msgspec.msgpack.decode(self._store.queue_pop(_queue(0)), type=Envelope)
        if envelope.error:
            name = self._world.describe(envelope.rank)
            raise RemoteError(f"verb '{envelope.verb}' failed on {name}:\n{envelope.error}")
        body = _follow(self._world, envelope)
        with self._lock:
            self._futures[envelope.call].accept(envelope.rank, body)

    def forget(self, call: int) -> None:
        with self._lock:
            del self._futures[call]

    def overdue(self) -> Overdue | None:
        now = time.monotonic()
        with self._lock:
            for future in self._futures.values():
                if now > future.deadline and future.missing:
                    return Overdue(future.verb, future.timeout_s, future.missing)
        return None


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

    def __getattr__(self, name: str) -> Callable[..., Future]:
        _, reply = _signature(self._kind, name)
        timeout_s = getattr(self._timeouts, getattr(self._kind, name).timeout)

        def call(argument: Any = None, *, parts: list[Any] | None = None) -> Future:
            number, future = self._mailbox.open(name, self._ranks, timeout_s, reply)
            shared = encode(argument) if parts is None else None
            for i, rank in enumerate(self._ranks):
                if rank != self._world.rank:
                    self._mailbox.send(number, name, rank, encode(parts[i]) if parts is not None else shared)
            if self._role is not None:
                own = argument if parts is None else parts[self._ranks.index(self._world.rank)]
                future.replies[self._world.rank] = _run(self._world, self._role, name, own)
            return future

        return call


def stop(world: World) -> None:
    """Tell every other rank that the run is over."""
    for rank in range(1, world.size):
        world.store.queue_push(_queue(rank), msgspec.msgpack.encode(Envelope(-1, 0, STOP, b"")))


# ---- every other rank -------------------------------------------------------------------------------------------------


def serve(world: World, role: Any) -> None:
    """Run verbs until rank 0 says stop. A verb that raises is reported to rank 0, then raised here."""
    store = world.store.clone()
    store.set_timeout(NEVER)
    sends: dict[int, tuple] = {}  # call -> body under way and its work handle, both alive until rank 0 has it
    while True:
        with world.phase("", verb="idle"):
            envelope = msgspec.msgpack.decode(store.queue_pop(_queue(world.rank)), type=Envelope)
        if envelope.verb == STOP:
            return
        try:
            argument, _ = _signature(type(role), envelope.verb)
            with world.phase("receive", verb=envelope.verb):
                body = _follow(world, envelope)
            reply = encode(_run(world, role, envelope.verb, decode(body, argument)))
        except Exception:
            report = Envelope(envelope.call, world.rank, envelope.verb, b"", error=traceback.format_exc())
            store.queue_push(_queue(0), msgspec.msgpack.encode(report))
            raise
        follows = len(reply) if len(reply) > INLINE else 0
        answer = Envelope(envelope.call, world.rank, envelope.verb, b"" if follows else reply, follows=follows)
        store.queue_push(_queue(0), msgspec.msgpack.encode(answer))
        sends = {call: send for call, send in sends.items() if call >= envelope.settled}
        if follows:  # not waited for: rank 0 may first want this rank inside a collective
            tensor = torch.frombuffer(bytearray(reply), dtype=torch.uint8)
            sends[envelope.call] = (tensor, dist.isend(tensor, 0, group=world.spanning))


def _run(world: World, role: Any, name: str, argument: Any) -> Any:
    method = getattr(role, name)
    with world.phase("", verb=name):
        return method() if argument is None else method(argument)


def _follow(world: World, envelope: Envelope) -> bytes:
    if not envelope.follows:
        return envelope.body
    tensor = torch.empty(envelope.follows, dtype=torch.uint8)
    dist.recv(tensor, envelope.rank, group=world.spanning)
    return tensor.numpy().tobytes()


def _queue(rank: int) -> str:
    return f"queue/{rank}"
