"""Route verbs from rank 0 to ranks, and their answers back to rank 0.

Rank 0 sends a verb in one request, however many ranks get it. Each connection that has subscribed for some of these ranks gets
one message with their numbers. Answers are one-way messages. Equal answers to one call are merged into one that lists its
ranks, so a verb without a result costs rank 0 one small answer, when the last rank has ended. An error is delivered at once. So
is each part of an answer in parts, unless it is the last one and empty.

Where ranks go through a relay (`relay.py`), the relay is the subscriber, and it merges equal answers of its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from pipeline.store.table import Missing, StoreRequest

BATCH = 1 << 20  # bytes of bodies in one reply to Collect, and about in one Send or Answers
NOTHING = b"\x90"  # an empty list in msgpack: an empty part of an answer
NO_CALL = -1  # the number of a message without an answer

Part = tuple[list[int], bytes]
"""Ranks and the message for them."""

Item = TypeVar("Item")


def batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Split items into lists of about BATCH bytes: each but the last ends with the item that reaches that size."""
    batch: list[Item] = []
    size_of_batch = 0
    for item in items:
        batch.append(item)
        size_of_batch += size(item)
        if size_of_batch >= BATCH:
            yield batch
            batch, size_of_batch = [], 0
    if batch:
        yield batch


# ---- requests ---------------------------------------------------------------------------------------------------------


class OneWay(StoreRequest):
    """A request without a reply."""


class Subscribe(OneWay):
    """Receive messages to these ranks over this connection, pushed as [[call, ranks, message], ...]."""

    ranks: list[int]


class Send(OneWay):
    """Send each rank its message. A call may be sent in several pieces, the final one marked `last`."""

    call: int
    parts: list[Part]
    in_parts: bool = False  # each rank answers in any number of parts
    last: bool = True


class VerbReply(msgspec.Struct, array_like=True, gc=False):
    """One or more ranks' equal replies to a call, or one part of a reply in parts."""

    call: int
    ranks: list[int]
    verb: str
    body: bytes  # empty if the body follows over the spanning group
    follows: int = 0  # bytes of a body that follows
    error: str = ""  # the traceback, if the verb raised
    more: bool = False  # further parts come
    account: tuple[float, float] = (0.0, 0.0)  # (idle, total) seconds of the ranks since their last answer
    digest: bytes = b""  # of a body that follows


class Answers(OneWay):
    """Answers of ranks on their way to rank 0."""

    answers: list[VerbReply]


class Collect(StoreRequest):
    """Take answers, on rank 0. Waits for one up to `timeout_s`; with 0 it may return none."""

    timeout_s: float


class Collected(msgspec.Struct, array_like=True):
    """The reply to Collect."""

    value: list[VerbReply] | None  # None: none has arrived in time


class Unanswered(StoreRequest):
    """Return the ranks that have not ended their answer to a call, on rank 0."""

    call: int


ANY = Subscribe | Send | Answers | Collect | Unanswered


# ---- to ranks ----------------------------------------------------------------------------------------------------------


class Subscriber(Protocol):
    """A connection that messages to ranks are pushed to."""

    def push(self, value: Any) -> None:
        """Send a value that replies to no request."""
        ...


class Router:
    """Push messages to the connection that has subscribed for their rank; keep them until a connection subscribes."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Subscriber] = {}
        self._ranks: dict[Subscriber, list[int]] = {}
        self._kept: dict[int, list[tuple[int, bytes]]] = {}

    def subscribe(self, subscriber: Subscriber, ranks: list[int]) -> None:
        """Push further messages to these ranks, and those kept for them, to `subscriber`."""
        self._ranks.setdefault(subscriber, []).extend(ranks)
        for rank in ranks:
            self._subscribers[rank] = subscriber
            for call, message in self._kept.pop(rank, []):
                subscriber.push([(call, [rank], message)])

    def leave(self, subscriber: Subscriber) -> None:
        """Drop the subscriptions of a connection that has ended."""
        for rank in self._ranks.pop(subscriber, ()):
            if self._subscribers.get(rank) is subscriber:
                del self._subscribers[rank]

    def send(self, call: int, parts: list[Part]) -> None:
        """Push each message to the subscribers of its ranks, one push for each subscriber."""
        outgoing: dict[Subscriber, list[tuple[int, list[int], bytes]]] = {}
        for ranks, message in parts:
            members: dict[Subscriber, list[int]] = {}
            for rank in ranks:
                subscriber = self._subscribers.get(rank)
                if subscriber is None:
                    self._kept.setdefault(rank, []).append((call, message))
                else:
                    members.setdefault(subscriber, []).append(rank)
            for subscriber, some in members.items():
                outgoing.setdefault(subscriber, []).append((call, some, message))
        for subscriber, messages in outgoing.items():
            subscriber.push(messages)


# ---- to rank 0 -------------------------------------------------------------------------------------------------------


def mergeable(answer: VerbReply) -> bool:
    """Return whether an answer may be merged with equal ones: it is whole, without error, and its body is inline."""
    return not (answer.more or answer.error or answer.follows)


def size_of(answer: VerbReply) -> int:
    """Return about how many bytes an answer takes in a message."""
    return len(answer.body) + len(answer.error) + 9 * len(answer.ranks)


def merge(answers: dict[tuple[int, bytes], VerbReply], answer: VerbReply) -> None:
    """Merge an answer into `answers`, by call and body. `answers` owns its values."""
    key = (answer.call, answer.body)
    if key not in answers:
        answers[key] = answer
        return
    same = answers[key]
    same.ranks += answer.ranks
    same.account = (same.account[0] + answer.account[0], same.account[1] + answer.account[1])


@dataclass
class _Open:
    """A call that some ranks have not answered yet."""

    in_parts: bool
    missing: set[int] = field(default_factory=set)
    sent: bool = False  # all pieces of the call have been sent
    answers: dict[tuple[int, bytes], VerbReply] = field(default_factory=dict)  # delivered when every rank has ended
    single: list[VerbReply] = field(default_factory=list)  # likewise, answers whose body follows


class PendingCalls:
    """Rank 0's open calls, and the answers that are ready for it."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ready: deque[VerbReply] = deque()

    def begin(self, send: Send) -> None:
        """Open a call, or add the ranks of a further piece of it."""
        if send.call == NO_CALL:
            return
        call = self._open.setdefault(send.call, _Open(send.in_parts))
        for ranks, _ in send.parts:
            call.missing.update(ranks)
        call.sent = send.last
        self._end(send.call, call)

    def accept(self, answer: VerbReply) -> None:
        """Add an answer; it becomes ready at once, or when all ranks of its call have ended."""
        call = self._open.get(answer.call)
        if answer.error or call is None:
            if answer.error:
                self._ready.append(answer)
            return
        if call.in_parts and (answer.more or answer.body != NOTHING):
            self._ready.append(answer)
        elif answer.follows:
            call.single.append(answer)
        else:
            merge(call.answers, answer)
        if not answer.more:
            call.missing.difference_update(answer.ranks)
            self._end(answer.call, call)

    def _end(self, number: int, call: _Open) -> None:
        if call.sent and not call.missing:
            self._ready += [*call.answers.values(), *call.single]
            del self._open[number]

    def ready(self) -> bool:
        """Return whether Collect would return an answer without waiting."""
        return bool(self._ready)

    def apply(self, request: Collect | Unanswered) -> list[VerbReply] | list[int]:
        """Return the reply's value. Raises Missing if the request must wait."""
        if isinstance(request, Unanswered):
            return sorted(self._open[request.call].missing) if request.call in self._open else []
        if not self._ready and request.timeout_s:
            raise Missing("answers")
        taken = next(batches(self._ready, size_of), [])
        for _ in taken:
            self._ready.popleft()
        return taken
