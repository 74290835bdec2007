"""Route verbs from rank 0 to ranks, and their replies back to rank 0.

Rank 0 sends a verb in a single request, however many ranks receive it. Each connection that has subscribed for some of these
ranks receives one message with their numbers. Replies are one-way messages. Equal replies to a call are merged into one reply
that lists its ranks, so for a verb without a result rank 0 gets one small reply, when the last rank has ended. Errors are
delivered at once. The parts of a reply in parts are delivered at once too, except an empty last part.

If ranks use a relay (`relay.py`), the relay is the subscriber, and it merges equal replies of its ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from pipeline.store.table import Missing, StoreRequest

BATCH = 1 << 20  # bytes of bodies in a reply to Collect, and approximately in a Send or Answers
NOTHING = b"\x90"  # an empty list in msgpack: an empty part of a reply
NO_CALL = -1  # the number of a message without a reply

Part = tuple[list[int], bytes]
"""(ranks, the message for them)."""

Item = TypeVar("Item")


def batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Split items into lists of about BATCH bytes: a list ends with the item that reaches that size."""
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
    """Push messages to these ranks over this connection, as [[call, ranks, message], ...]."""

    ranks: list[int]


class Send(OneWay):
    """Send each rank its message. A call may be sent in several pieces, of which the final piece has `last`."""

    call: int
    parts: list[Part]
    in_parts: bool = False  # each rank replies in any number of parts
    last: bool = True


class VerbReply(msgspec.Struct, array_like=True, gc=False):
    """The equal replies of one or more ranks to a call, or a part of a reply in parts."""

    call: int
    ranks: list[int]
    verb: str
    body: bytes  # empty if the body follows over the spanning group
    follows: int = 0  # bytes of a body that follows
    error: str = ""  # the traceback, if the verb raised
    more: bool = False  # further parts come
    account: tuple[float, float] = (0.0, 0.0)  # (idle, total) seconds of the ranks since their last reply
    digest: bytes = b""  # of a body that follows


class Answers(OneWay):
    """Send replies of ranks to rank 0."""

    answers: list[VerbReply]


class Collect(StoreRequest):
    """Take replies, on rank 0. Wait up to `timeout_s` for the first reply; with 0, do not wait."""

    timeout_s: float


class Collected(msgspec.Struct, array_like=True):
    """The reply to Collect."""

    value: list[VerbReply] | None  # None: no reply has arrived in time


class Unanswered(StoreRequest):
    """Return, on rank 0, the ranks whose replies to a call are not complete."""

    call: int


ANY = Subscribe | Send | Answers | Collect | Unanswered


# ---- to ranks ----------------------------------------------------------------------------------------------------------


class Subscriber(Protocol):
    """A connection over which messages to ranks are pushed."""

    def push(self, value: Any) -> None:
        """Send a value that is not the reply to a request."""
        ...


class Router:
    """Pushes each message to the connection that has subscribed for its rank, and stores it until there is a subscriber."""

    def __init__(self) -> None:
        self._subscribers: dict[int, Subscriber] = {}
        self._ranks: dict[Subscriber, list[int]] = {}
        self._undelivered: dict[int, list[tuple[int, bytes]]] = {}

    def subscribe(self, subscriber: Subscriber, ranks: list[int]) -> None:
        """Push the undelivered and all further messages to these ranks to `subscriber`."""
        self._ranks.setdefault(subscriber, []).extend(ranks)
        for rank in ranks:
            self._subscribers[rank] = subscriber
            for call, message in self._undelivered.pop(rank, []):
                subscriber.push([(call, [rank], message)])

    def leave(self, subscriber: Subscriber) -> None:
        """Drop the subscriptions of a connection that has ended."""
        for rank in self._ranks.pop(subscriber, ()):
            if self._subscribers.get(rank) is subscriber:
                del self._subscribers[rank]

    def send(self, call: int, parts: list[Part]) -> None:
        """Push each message to the subscribers of its ranks, with one push for each subscriber."""
        outgoing: dict[Subscriber, list[tuple[int, list[int], bytes]]] = {}
        for ranks, message in parts:
            members: dict[Subscriber, list[int]] = {}
            for rank in ranks:
                subscriber = self._subscribers.get(rank)
                if subscriber is None:
                    self._undelivered.setdefault(rank, []).append((call, message))
                else:
                    members.setdefault(subscriber, []).append(rank)
            for subscriber, subscriber_ranks in members.items():
                outgoing.setdefault(subscriber, []).append((call, subscriber_ranks, message))
        for subscriber, messages in outgoing.items():
            subscriber.push(messages)


# ---- to rank 0 -------------------------------------------------------------------------------------------------------


def mergeable(answer: VerbReply) -> bool:
    """Return whether a reply may be merged with equal replies: it is whole, without error, and its body is inline."""
    return not (answer.more or answer.error or answer.follows)


def size_of(answer: VerbReply) -> int:
    """Return approximately how many bytes a reply takes in a message."""
    return len(answer.body) + len(answer.error) + 9 * len(answer.ranks)


def merge(answers: dict[tuple[int, bytes], VerbReply], answer: VerbReply) -> None:
    """Merge a reply into `answers`, which is (call, body) -> reply. May change the values of `answers`."""
    key = (answer.call, answer.body)
    if key not in answers:
        answers[key] = answer
        return
    merged = answers[key]
    merged.ranks += answer.ranks
    merged.account = (merged.account[0] + answer.account[0], merged.account[1] + answer.account[1])


@dataclass
class _Open:
    """A call to which some ranks have not replied yet."""

    in_parts: bool
    missing: set[int] = field(default_factory=set)
    is_sent: bool = False  # whether all pieces of the call have been sent
    answers: dict[tuple[int, bytes], VerbReply] = field(
        default_factory=dict
    )  # replies that are delivered when every rank has ended
    single: list[VerbReply] = field(default_factory=list)  # replies whose body follows, delivered at the same time


class PendingCalls:
    """Rank 0's open calls, and the replies that are ready for it."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ready: deque[VerbReply] = deque()

    def begin(self, send: Send) -> None:
        """Open a call, or add the ranks of another piece of it."""
        if send.call == NO_CALL:
            return
        call = self._open.setdefault(send.call, _Open(send.in_parts))
        for ranks, _ in send.parts:
            call.missing.update(ranks)
        call.is_sent = send.last
        self._end(send.call, call)

    def accept(self, answer: VerbReply) -> None:
        """Add a reply. An error or a part of a reply is ready at once, other replies when all ranks of the call have ended."""
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
        if call.is_sent and not call.missing:
            self._ready += [*call.answers.values(), *call.single]
            del self._open[number]

    def ready(self) -> bool:
        """Return whether Collect would return a reply without waiting."""
        return bool(self._ready)

    def apply(self, request: Collect | Unanswered) -> list[VerbReply] | list[int]:
        """Return the value of the reply to a request. Raises Missing if the request must wait."""
        if isinstance(request, Unanswered):
            return sorted(self._open[request.call].missing) if request.call in self._open else []
        if not self._ready and request.timeout_s:
            raise Missing("answers")
        replies = next(batches(self._ready, size_of), [])
        for _ in replies:
            self._ready.popleft()
        return replies
