"""Verbs on their way to many ranks, and their answers on the way to rank 0.

Rank 0 sends a verb with one request, whoever gets it; each connection that has subscribed for some of these ranks gets one
message, with their numbers. Answers are not asked for and not replied to. Equal ones of one call become one, with the ranks
that gave them, so a verb to which nobody has anything to say comes back as one small answer, when the last rank has ended.
An error comes back at once, and so does each part of an answer in parts, unless it is the last one and empty.

Where ranks go through a relay (`relay.py`), that is the subscriber, and it sends equal answers of its ranks on as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from pipeline.store.table import Missing, Request

BATCH = 1 << 20  # bytes of bodies in one reply to Collect, and about as many in one Send or Answers
NOTHING = b"\x90"  # an empty list as msgpack: the part of an answer that says nothing
NO_CALL = -1  # what is not answered

Part = tuple[list[int], bytes]
"""Ranks, and what they get."""

Item = TypeVar("Item")


def batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Cut items into lists of about BATCH bytes: each but the last ends with the item that brings it there."""
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += size(item)
        if held >= BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# ---- requests ---------------------------------------------------------------------------------------------------------


class OneWay(Request):
    """No reply follows."""


class Subscribe(OneWay):
    """From now on what is sent to these ranks comes over this connection, as pushed replies: [[call, ranks, message], ...]."""

    ranks: list[int]


class Send(OneWay):
    """Let each rank have its message. A call may be sent in several pieces; `last` marks the last one."""

    call: int
    parts: list[Part]
    in_parts: bool = False  # each rank answers any number of times
    last: bool = True


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What one or more ranks reply to a call, or a part of it."""

    call: int
    ranks: list[int]
    verb: str
    body: bytes  # empty if it follows over the spanning group
    follows: int = 0  # bytes that do
    error: str = ""  # the traceback, instead of a reply
    more: bool = False  # other parts follow
    account: tuple[float, float] = (0.0, 0.0)  # since the last one: seconds that the ranks waited, of those that they lived
    digest: bytes = b""  # of what follows


class Answers(OneWay):
    answers: list[Answer]


class Collect(Request):
    """On rank 0: wait for answers, and take them. With no time to wait, there may be none; else it waits for ever."""

    timeout_s: float


class Collected(msgspec.Struct, array_like=True):
    """A Reply to Collect."""

    value: list[Answer]


class Unanswered(Request):
    """Ask, on rank 0, for the ranks that have not ended their answer to a call."""

    call: int


ANY = Subscribe | Send | Answers | Collect | Unanswered


# ---- down -------------------------------------------------------------------------------------------------------------


class Subscriber(Protocol):
    """A connection."""

    def push(self, value: Any) -> None: ...


class Router:
    """Which connection takes the mail of which rank, and what came for ranks that have not subscribed yet."""

    def __init__(self) -> None:
        self._ways: dict[int, Subscriber] = {}
        self._ranks: dict[Subscriber, list[int]] = {}
        self._kept: dict[int, list[tuple[int, bytes]]] = {}

    def subscribe(self, way: Subscriber, ranks: list[int]) -> None:
        self._ranks.setdefault(way, []).extend(ranks)
        for rank in ranks:
            self._ways[rank] = way
            for call, message in self._kept.pop(rank, []):
                way.push([(call, [rank], message)])

    def leave(self, way: Subscriber) -> None:
        """A connection has ended."""
        for rank in self._ranks.pop(way, ()):
            if self._ways.get(rank) is way:
                del self._ways[rank]

    def send(self, call: int, parts: list[Part]) -> None:
        outgoing: dict[Subscriber, list[tuple[int, list[int], bytes]]] = {}
        for ranks, message in parts:
            members: dict[Subscriber, list[int]] = {}
            for rank in ranks:
                way = self._ways.get(rank)
                if way is None:
                    self._kept.setdefault(rank, []).append((call, message))
                else:
                    members.setdefault(way, []).append(rank)
            for way, some in members.items():
                outgoing.setdefault(way, []).append((call, some, message))
        for way, messages in outgoing.items():
            way.push(messages)


# ---- up ---------------------------------------------------------------------------------------------------------------


def final(answer: Answer) -> bool:
    """Whether it may become one with an equal one: each rank gives one such answer to a call."""
    return not (answer.more or answer.error or answer.follows)


def weight(answer: Answer) -> int:
    """Return about how many bytes an answer takes in a message."""
    return len(answer.body) + len(answer.error) + 9 * len(answer.ranks)


def join(answers: dict[tuple[int, bytes], Answer], answer: Answer) -> None:
    """Add a final answer to others. `answers` owns its values."""
    key = (answer.call, answer.body)
    if key not in answers:
        answers[key] = answer
        return
    same = answers[key]
    same.ranks += answer.ranks
    same.account = (same.account[0] + answer.account[0], same.account[1] + answer.account[1])


@dataclass
class _Open:
    """Hold a call that not all ranks have answered to the end."""

    in_parts: bool
    missing: set[int] = field(default_factory=set)
    sent: bool = False  # to all that get it
    answers: dict[tuple[int, bytes], Answer] = field(default_factory=dict)  # that rank 0 gets when all have ended
    single: list[Answer] = field(default_factory=list)  # likewise, those with a body that follows


class PendingCalls:
    """Keep what rank 0 has asked, and what it is to be told."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ready: deque[Answer] = deque()

    def begin(self, send: Send) -> None:
        if send.call == NO_CALL:
            return
        call = self._open.setdefault(send.call, _Open(send.in_parts))
        for ranks, _ in send.parts:
            call.missing.update(ranks)
        call.sent = send.last
        self._end(send.call, call)

    def accept(self, answer: Answer) -> None:
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
            join(call.answers, answer)
        if not answer.more:
            call.missing.difference_update(answer.ranks)
            self._end(answer.call, call)

    def _end(self, number: int, call: _Open) -> None:
        if call.sent and not call.missing:
            self._ready += [*call.answers.values(), *call.single]
            del self._open[number]

    def ready(self) -> bool:
        return bool(self._ready)

    def apply(self, request: Collect | Unanswered) -> list[Answer] | list[int]:
        """The reply's value. Raises Missing if it must wait."""
        if isinstance(request, Unanswered):
            return sorted(self._open[request.call].missing) if request.call in self._open else []
        if not self._ready and request.timeout_s:
            raise Missing("answers")
        taken = next(batches(self._ready, weight), [])
        for _ in taken:
            self._ready.popleft()
        return taken
