"""The calling end of RPC, on rank 0: it numbers calls, sends them and assigns the replies to futures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec
import torch.distributed as dist

from pipeline.files.encoding import decode, encode
from pipeline.job.watchdog import Overdue, PeerError
from pipeline.job.world import World
from pipeline.rpc.messages import STOP, Envelope, as_tensor, digest, following, receive_body, send_body
from pipeline.rpc.verbs import Item, StreamingReply, run, signature
from pipeline.store import messaging

Role = TypeVar("Role", covariant=True)
Arguments = ParamSpec("Arguments")
Part = TypeVar("Part")
Reply = TypeVar("Reply")

REOPEN_S = 5.0  # to reconnect to a store that was stuck
LOOK_S = 0.02
"""Seconds between two looks for answers of other ranks while rank 0's own role works."""
RETURN_S = 1.0
"""Seconds after which `receive` returns even without an answer if rank 0 has a role, so that its caller can do other work."""


class RpcError(PeerError):
    """A verb raised on another rank; the message has its traceback."""


class LeadingRole(Protocol):
    """Rank 0's own role if it works between verbs, as an engine's leader does."""

    def advance(self, stop: Callable[[], bool], look_s: float) -> None:
        """Work until `stop` returns True or nothing is left to do. look_s: longest wait between two calls of `stop`."""

    def release(self) -> None:
        """Let the engine's other ranks take their next verb. Called before each verb and at the end."""


@dataclass(frozen=True)
class Call:
    """A verb to run on a component, its timeout and the type of its reply."""

    verb: str
    component: str
    timeout_s: float
    kind: Any  # the reply's type
    in_parts: bool


class Future(Generic[Reply]):
    """The replies of one call, from each of its ranks. Reply: the type that the verb returns."""

    def __init__(self, client: RpcClient, number: int, call: Call, ranks: tuple[int, ...]):
        self.verb = call.verb
        self.number = number
        self.component = call.component
        self.timeout_s = call.timeout_s
        self.in_parts = call.in_parts
        self.deadline = time.monotonic() + call.timeout_s
        self.sends: list = []  # bodies in flight and their work handles
        self._client = client
        self._ranks = ranks
        self._kind = call.kind
        self._replies: dict[int, Any] = {rank: [] for rank in ranks} if self.in_parts else {}
        self._missing = set(ranks)
        self._fresh: list[tuple[int, list[Any]]] = []

    @property
    def missing(self) -> list[int]:
        """The ranks whose replies are not complete. The store delivers the replies of a plain call only when all are there."""
        return sorted(self._missing)

    @property
    def suspects(self) -> list[int]:
        """The ranks that may hold up a late reply.

        For a reply in parts these are all ranks: an engine's other ranks end their replies at once, and its leader may wait for
        them.
        """
        return list(self._ranks) if self.in_parts else self.missing

    @property
    def done(self) -> bool:
        """True if every rank has sent its whole reply."""
        return not self._missing

    def accept(self, ranks: list[int], body: bytes, more: bool) -> None:
        """Decode the equal replies of several ranks, which share one object."""
        reply = decode(body, self._kind)
        for rank in ranks:
            self.reply(rank, reply, more)

    def reply(self, rank: int, reply: Any, more: bool = False) -> None:
        """Add a reply of a rank, or a part of it."""
        if not self.in_parts:
            self._replies[rank] = reply
        elif reply:
            self._replies[rank] += reply
            self._fresh.append((rank, reply))
        if not more:
            self._missing.discard(rank)

    def take(self: Future[StreamingReply[Item]]) -> list[tuple[int, list[Item]]]:
        """Return (rank, items) pairs: the items of a streaming reply that arrived since the last call. Does not wait.

        Items that were taken are not in `result`.
        """
        fresh, self._fresh = self._fresh, []
        self._replies |= {rank: [] for rank, _ in fresh}
        return fresh

    @overload
    def result(self: Future[StreamingReply[Item]]) -> list[list[Item]]: ...
    @overload
    def result(self) -> list[Reply]: ...
    def result(self) -> list[Any]:
        """Wait for every rank and return their replies in rank order. Raises RpcError if the verb raised on a rank."""
        while self._missing:
            self._client.receive(f"wait for {self.verb}", self)
        return [self._replies[rank] for rank in self._ranks]


@dataclass(frozen=True)
class Arriving:
    """A reply's body that rank 0 receives over the spanning group."""

    call: int
    rank: int
    since: float


class RpcClient:
    """Sends calls from rank 0 and assigns their replies to futures."""

    def __init__(self, world: World):
        self._world = world
        self._next = 0
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()  # the watchdog reads the futures from its thread
        self._awaited: Future[Any] | None = None  # the future that rank 0 waits for; None: any
        self._waiting_since: float | None = None  # since when rank 0 waits for a message, and its own role has nothing to do
        self._own_looked: float | None = None  # when rank 0's own role, which works, last called `stop`
        self._arriving: Arriving | None = None  # the body that rank 0 waits for
        self.leading_role: LeadingRole | None = None  # rank 0's role, if it works between verbs
        self._own_replied = False  # a reply in parts of `own` has new parts
        self._store = world.store.clone()
        self._asking = world.store.clone()  # the watchdog's connection

    def open(self, call: Call, ranks: tuple[int, ...]) -> Future[Any]:
        """Give a call a number, and return its future."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._futures[number] = future = Future(self, number, call, ranks)
        return future

    def send(self, future: Future[Any], parts: Iterable[tuple[list[int], bytes]]) -> None:
        """Send a call to its ranks. parts: (ranks, body for them)."""
        messages: list[messaging.Part] = []
        settled = min(self._futures)
        for ranks, body in parts:
            if not ranks:
                continue  # rank 0 is the only member
            follows = following(body)
            receivers = tuple(ranks) if follows else ()
            envelope = Envelope(future.number, future.verb, b"" if follows else body, settled, follows, digest(body), receivers)
            messages.append((ranks, msgspec.msgpack.encode(envelope)))
            if follows:
                future.sends.append(send_body(self._world, as_tensor(body), future.number, ranks[0]))
        pieces = list(messaging.batches(messages, lambda part: len(part[1]) + 5 * len(part[0])))
        for piece in pieces:
            self._store.send(messaging.Send(future.number, piece, future.in_parts, last=piece is pieces[-1]))

    def receive(self, phase: str, awaited: Future[Any] | None = None) -> None:
        """Wait for answers and assign them. awaited: the future that rank 0 waits for; None: any future.

        While it waits, rank 0's own role works if it has one; then `receive` may return without an answer after RETURN_S.
        Raises RuntimeError if no call is open, because no answer could arrive.
        """
        if not self._futures:
            raise RuntimeError(f"{phase}: no call is open")
        self._awaited = awaited
        with self._world.phase(phase, verb="idle"):
            if self.leading_role:
                answers = self._work_leading_role(self.leading_role)
            else:
                self._waiting_since = time.monotonic()
                answers = self._store.collect()
                self._waiting_since = None
        for answer in answers:
            self._sort(answer)

    def _work_leading_role(self, role: LeadingRole) -> list[messaging.VerbReply]:
        """Let rank 0's own role work, and return the answers that arrive.

        The work ends when an answer arrives, the role itself replies, or RETURN_S have passed.
        """
        answers: list[messaging.VerbReply] = []
        began, looked = time.monotonic(), 0.0

        def stop() -> bool:
            nonlocal answers, looked
            now = self._own_looked = time.monotonic()
            if not (answers or self._own_replied) and now - looked > LOOK_S:
                answers, looked = self._store.collect(0.0), now
            return bool(answers or self._own_replied or now - began > RETURN_S)

        role.advance(stop, LOOK_S)
        self._own_looked = None
        if answers or self._own_replied or time.monotonic() - began > RETURN_S:
            self._waiting_since = None
        else:  # it has nothing to do
            self._waiting_since = self._waiting_since or began
            answers = self._store.collect(RETURN_S)
            self._waiting_since = None if answers else self._waiting_since
        self._own_replied = False
        return answers

    def run_own_role(self, role: Any, future: Future[Any], argument: Any) -> None:
        """Run a verb of rank 0's own role, and add its reply, or each part of it, to the future."""
        if role is self.leading_role:
            role.release()
        reply = run(self._world, role, future.verb, argument)
        if not future.in_parts:
            future.reply(self._world.rank, reply)
            return

        def send(items: list[Any], more: bool) -> None:
            self._own_replied = True
            future.reply(self._world.rank, items, more)
            self.settle(future.number)

        reply.send_by(send)

    def poll(self) -> bool:
        """Assign the answers that have arrived; return whether there were any."""
        answers = self._store.collect(0.0)
        for answer in answers:
            self._sort(answer)
        return bool(answers)

    def _sort(self, answer: messaging.VerbReply) -> None:
        if answer.error:
            name = self._world.describe(answer.ranks[0])
            raise RpcError(f"verb '{answer.verb}' failed on {name}:\n{answer.error}")
        body = answer.body
        if answer.follows:
            source = answer.ranks[0]
            with self._world.phase(f"receive the body of {self._world.describe(source)}", verb=answer.verb):
                self._arriving = Arriving(answer.call, source, time.monotonic())
                body = receive_body(self._world, answer.follows, answer.digest, answer.call, source).numpy().tobytes()
                self._arriving = None
        with self._lock:
            future = self._futures[answer.call]
            self._world.timeline.add_account(future.component, answer.account)
            future.accept(answer.ranks, body, answer.more)
        self.settle(answer.call)

    def settle(self, call: int) -> None:
        """Forget the call if every rank has replied."""
        with self._lock:
            if call in self._futures and self._futures[call].done:
                del self._futures[call]

    def overdue(self) -> Overdue | None:
        """Return a call past its deadline, if there is one.

        - A call with one reply is late after its timeout, if the store still waits for ranks.
        - A call with a reply in parts may run for any time, and its parts may be queued while rank 0 is busy. It is late when
          rank 0 has waited for it, or for any message, longer than its timeout.
        - A call of rank 0's own role is late when one step of the role takes longer than the timeout.
        - A large body of a reply, which follows its message, is late when rank 0 receives it for longer than the timeout.
        """
        now, since, awaited, arriving = time.monotonic(), self._waiting_since, self._awaited, self._arriving
        looked = self._own_looked
        with self._lock:
            open_ = [future for future in self._futures.values() if not future.done]
        for future in open_:
            if arriving and future.number == arriving.call and now > max(arriving.since + future.timeout_s, future.deadline):
                return Overdue(future.verb, future.timeout_s, [arriving.rank])
            if not future.in_parts and now > future.deadline and (missing := self._silent_ranks(future)):
                return Overdue(future.verb, future.timeout_s, missing)
            if looked is not None and self._world.rank in future.missing and now > looked + future.timeout_s:
                return Overdue(future.verb, future.timeout_s, future.suspects)
        if since is None:
            return None
        waited_for = [future for future in open_ if future.in_parts and awaited in (None, future)]
        late = [future for future in waited_for if now > max(since + future.timeout_s, future.deadline)]
        if not late:
            return None
        return Overdue(late[0].verb, late[0].timeout_s, sorted({rank for future in late for rank in future.suspects}))

    def _silent_ranks(self, future: Future[Any]) -> list[int]:
        """Return the ranks that the store waits for, and rank 0 while it runs its own verb; none if the store is stuck."""
        try:
            return [*({self._world.rank} & set(future.missing)), *self._asking.silent_ranks(future.number)]
        except dist.DistError:  # closed, so that the next request does not read a late reply
            with contextlib.suppress(dist.DistError):  # retried at the next look; the watchdog notices a dead store
                self._asking = self._world.store.clone(REOPEN_S)
            return []


class RpcGroup(Generic[Role]):
    """A group of ranks that serve a role, as rank 0 calls it."""

    def __init__(
        self,
        client: RpcClient,
        world: World,
        ranks: tuple[int, ...],
        kind: type[Role],
        timeouts: Any,
        role: Role | None = None,
    ):
        """Bind to ranks that serve a `kind`. role: rank 0's own role, if it is in the group."""
        self._client = client
        self._world = world
        self.ranks = ranks
        self._others = [rank for rank in ranks if rank != world.rank]
        self._component = world.workers.name(ranks[0]) if ranks else ""
        self._kind = kind
        self._timeouts = timeouts
        self._role = role

    @property
    def includes_caller(self) -> bool:
        """True if rank 0 is in the group."""
        return self._role is not None

    def receive_replies(self, block: bool) -> bool:
        """Assign the answers that have arrived for calls of any group. block: wait for an answer if there is none.

        Return False if there is none and `block` is False.
        """
        if not block:
            return self._client.poll()
        self._client.receive(f"wait for {self._component}")
        return True

    def call(
        self,
        verb: Callable[Concatenate[Role, Arguments], Reply],
        /,
        *argument: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Future[Reply]:
        """Call a verb of the role on all ranks, with the same argument if it takes one."""
        value = next(iter((*argument, *named.values())), None)
        return self._begin(verb, [(self._others, encode(value))], value)

    def scatter(self, verb: Callable[[Role, Part], Reply], parts: Sequence[Part]) -> Future[Reply]:
        """Call a verb of the role with one argument for each rank. Ranks that get the same object share one message."""
        argument = parts[self.ranks.index(self._world.rank)] if self._role is not None else None
        return self._begin(verb, self._distinct_arguments(parts), argument)

    def _begin(self, verb: Callable[..., Any], messages: Iterable[tuple[list[int], bytes]], argument: Any) -> Future[Any]:
        """Send a call, and run its verb on rank 0's own role. messages: (ranks, their argument). argument: rank 0's."""
        name = verb.__name__
        if not any(vars(base).get(name) is verb for base in self._kind.__mro__):
            raise TypeError(f"got verb {verb.__qualname__}; expected a verb of {self._kind.__name__}")
        types = signature(verb)
        timeout_s = getattr(self._timeouts, types.timeout)
        future = self._client.open(Call(name, self._component, timeout_s, types.reply, types.in_parts), self.ranks)
        self._client.send(future, messages)
        if self._role is not None:
            self._client.run_own_role(self._role, future, argument)
        self._client.settle(future.number)
        return future

    def _distinct_arguments(self, parts: Sequence[Any]) -> Iterable[tuple[list[int], bytes]]:
        """Return pairs (ranks, their encoded argument), one for each distinct argument."""
        members: dict[int, tuple[list[int], Any]] = {}
        for rank, part in zip(self.ranks, parts, strict=True):
            if rank != self._world.rank:
                members.setdefault(id(part), ([], part))[0].append(rank)
        return ((ranks, encode(part)) for ranks, part in members.values())


def stop(world: World, role: LeadingRole | None = None) -> None:
    """Send every other rank the message that ends `serve`. role: rank 0's, if it works between verbs."""
    if role:
        role.release()
    message = msgspec.msgpack.encode(Envelope(messaging.NO_CALL, STOP, b""))
    world.store.clone().send(messaging.Send(messaging.NO_CALL, [(list(range(1, world.size)), message)]))
