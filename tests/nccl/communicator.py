"""A communicator with NCCL's behaviour over its own gloo group: creation is collective, and operations run in one order."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CARD_BYTES = 2048
"""Size of the message in which a rank describes its operation to the others."""
POLL_S = 0.005
CONNECTING = timedelta(seconds=60)


class BrokenRule(RuntimeError):
    """NCCL would refuse this, hang, or corrupt memory."""


@dataclass(frozen=True)
class Member:
    """This rank's place in a communicator. All rank numbers are those of the spanning world."""

    ranks: tuple[int, ...]
    rank: int
    node: str
    device: str  # the name of its GPU on that node

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)


def gloo(store: dist.Store, index: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group for host tensors, without a name in torch. Blocks until all its ranks call.

    timeout: of its operations. Connecting may take longer on a busy machine.
    """
    group = dist.ProcessGroup(store, index, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, index, size, timeout=max(timeout, CONNECTING))
    backend._set_default_timeout(timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@dataclass(frozen=True)
class Collective:
    """A collective operation of a communicator, with the arguments that all ranks must give alike."""

    name: str
    about: str
    run: Callable[[dist.ProcessGroup], dist.Work]
    sends: tuple[int, ...] | None = None  # elements to each rank, where they may differ
    receives: tuple[int, ...] | None = None  # the same, from each rank

    def __str__(self) -> str:
        splits = "" if self.sends is None else f", sends {list(self.sends)}, receives {list(self.receives)}"
        return f"{self.name} of {self.about}{splits}"


@dataclass(frozen=True)
class Message:
    """A send or a receive of a batch."""

    sends: bool
    peer: int  # its index in the communicator
    tensor: torch.Tensor


Operation = Collective | list[Message]


class Communicator:
    """Made at a group's first use. Its thread is the stream: operations run one after another in the given order."""

    def __init__(self, store: dist.Store, member: Member, timeout_s: float):
        """Block until all ranks have joined.

        Raises BrokenRule if one has not after `timeout_s`, or if two share a device.
        """
        self._store = store
        self._member = member
        self._timeout_s = timeout_s
        self._begun = 0
        self._under_way: Operation = []
        self._error: Exception | None = None  # the end of the communicator
        self._messages: Counter[tuple[bool, int]] = Counter()  # so far, by direction and peer
        self._meet()
        self._gloo = gloo(dist.PrefixStore("gloo", store), member.index, len(member.ranks), timedelta(seconds=timeout_s))
        self._stream = ThreadPoolExecutor(1, f"stream of {self}")
        print(f"{self} is made", flush=True)

    def __str__(self) -> str:
        return f"the communicator of ranks {', '.join(map(str, self._member.ranks))}"

    def _meet(self) -> None:
        """Wait for all ranks, then compare their devices, like ncclCommInitRank."""
        own = self._member
        self._store.set(f"device/{own.rank}", json.dumps([own.node, own.device]))
        deadline = time.monotonic() + self._timeout_s
        while absent := [rank for rank in own.ranks if not self._store.check([f"device/{rank}"])]:
            if time.monotonic() > deadline:
                raise BrokenRule(
                    f"{self} is not made: after {self._timeout_s:g} s rank {own.rank} still waits in its first operation for"
                    f" rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}. NCCL makes a communicator at its first"
                    " operation and waits for all its ranks; try an operation of all ranks where the group is made"
                )
            time.sleep(POLL_S)
        places: dict[str, int] = {}
        for rank in own.ranks:
            node, device = place = json.loads(self._store.get(f"device/{rank}"))
            if (other := places.setdefault(str(place), rank)) != rank:
                raise BrokenRule(
                    f"ncclInvalidUsage: Duplicate GPU detected : rank {other} and rank {rank} both on CUDA device {device} of"
                    f" {node} ({self})"
                )

    def enqueue(self, operation: Operation, done: torch.futures.Future | None = None) -> torch.futures.Future:
        """Return a future, `done` if given, that completes with the operation or with its error."""
        done = done or torch.futures.Future()
        self._stream.submit(self._run, operation, done)
        return done

    @torch.no_grad()  # with gradients, an all-gather of gloo in this thread does not end
    def _run(self, operation: Operation, done: torch.futures.Future) -> None:
        try:
            if self._error:
                raise self._error
            self._under_way = operation
            self._begun += 1
            (self._collect if isinstance(operation, Collective) else self._exchange)(operation)
            done.set_result(None)
        except Exception as error:
            self._error = error
            done.set_exception(error)

    def _end(self, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))  # without it, a message waits as long as connecting may take
        except RuntimeError as error:  # gloo's, after `timeout_s`, or after another rank has given up
            raise BrokenRule(f"the operations of {self} do not end after {self._timeout_s:g} s: {self._stuck()}") from error

    # ---- collectives --------------------------------------------------------------------------------------------------------

    def _collect(self, operation: Collective) -> None:
        """Compare the operation with the other ranks' current ones, then run it."""
        card = [operation.name, operation.about, operation.sends, operation.receives]
        size = len(self._member.ranks)
        cards = [torch.empty(CARD_BYTES, dtype=torch.uint8) for _ in range(size)]
        self._end(self._gloo.allgather([cards], [_written(card)]))
        others = [_read(card) for card in cards]
        alike = all(other[:2] == card[:2] for other in others)
        splits = alike and operation.sends is not None
        if not alike or (splits and any(a[2][j] != b[3][i] for i, a in enumerate(others) for j, b in enumerate(others))):
            raise BrokenRule(
                f"the operations of {self} differ in number {self._begun}: "
                + "; ".join(f"rank {rank}: {_told(other)}" for rank, other in zip(self._member.ranks, others, strict=True))
            )
        self._end(operation.run(self._gloo))

    # ---- messages -----------------------------------------------------------------------------------------------------------

    def _exchange(self, batch: list[Message]) -> None:
        """Send and receive all at once.

        A message's header goes first, and its tag depends on it: gloo ends a process that receives more than it expects.
        """
        works, cards = [], []
        for message in batch:
            number = self._messages[message.sends, message.peer]
            self._messages[message.sends, message.peer] += 1
            held = elements(message.tensor)
            card = _written(held) if message.sends else torch.empty(CARD_BYTES, dtype=torch.uint8)
            carry = self._gloo.send if message.sends else self._gloo.recv
            cards.append((carry([card], message.peer, number), card, message))  # a header must stay allocated until it is sent
            tag = 1 << 30 | zlib.crc32(f"{number} {held}".encode()) >> 2
            works.append(carry([message.tensor.detach()], message.peer, tag))
        for work, card, message in cards:
            self._end(work)
            if not message.sends and (sent := _read(card)) != (awaited := elements(message.tensor)):
                peer, own = self._member.ranks[message.peer], self._member.rank
                raise BrokenRule(
                    f"the messages of {self} differ: rank {peer} sends {sent}, where rank {own} receives {awaited}"
                )
        for work in works:
            self._end(work)

    # ---- operations that never end ------------------------------------------------------------------------------------------

    def _stuck(self) -> str:
        """Report the operations that all ranks are in. They give up after the same time, but may have begun later."""
        store = self._store.clone()
        store.set(f"stuck/{self._member.rank}", f"operation {self._begun}, {self._told()}")
        deadline = time.monotonic() + self._timeout_s
        stuck: dict[int, str] = {}
        while len(stuck) < len(self._member.ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
            for rank in self._member.ranks:
                if rank not in stuck and store.check([f"stuck/{rank}"]):
                    stuck[rank] = store.get(f"stuck/{rank}").decode()
        return "; ".join(f"rank {rank}: {stuck.get(rank, 'none that waits')}" for rank in self._member.ranks)

    def _told(self) -> str:
        if isinstance(self._under_way, Collective):
            return str(self._under_way)
        words = []
        for message in self._under_way:
            way = "send to" if message.sends else "receive from"
            words.append(f"{way} rank {self._member.ranks[message.peer]} of {elements(message.tensor)}")
        return ", ".join(words)


def elements(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def _told(card: list[Any]) -> str:
    name, about, sends, receives = card
    return str(Collective(name, about, lambda _: None, sends, receives))


def _written(card: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(card).encode().ljust(CARD_BYTES)), dtype=torch.uint8)


def _read(card: torch.Tensor) -> Any:
    return json.loads(card.numpy().tobytes())
