"""Run the rounds of a refit on one rank: while a round is being sent, the next round is packed; then the round is applied.

Both ends post the messages of a round in one batch, and all ranks run the rounds in the same order. So no batch ever waits for
a later batch, and there is no deadlock with gloo or NCCL. A rank that relays must have received the messages of the round
before, so it waits for them before it posts; all other ranks post first, which keeps the network busy. Tags separate these
messages from other messages over the spanning group, and from each other: if a message is lost, its receiver waits for it and
never takes the next message in its place.

Between two ranks that both map the sender's staging memory (`shared_memory.py`) the bytes of a round are not sent. A notice
says that the round is packed, the receiver reads it in place, and a receipt says that it has been read. A sender has staging
memory for two rounds, so it waits for the receipts of round r - 2 before it packs round r. A receiver applies and acknowledges
a round before it waits for receipts of its own messages, so ranks that relay in a ring never wait for each other in a circle.

An `Encoding` (`full.py`, `delta.py`) defines the contents of messages. The watchdog handles timeouts: it reports the phase,
which names the ranks that this rank waits for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from pipeline.job.world import World
from pipeline.refit.tables import RankPlan

TAG = 1  # first tag of messages; other messages over the spanning group have tag 0
RECEIPT = 1 << 30  # first tag of receipts, which go in the opposite direction

PeerTensors = list[tuple[int, torch.Tensor]]
"""Pairs (global rank of the other end, contiguous uint8 tensor), in the order in which both ends post them."""


class StageTimer:
    """Sums the seconds of each stage; on a GPU, the seconds of the current stream."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._events = [_event()] if self._cuda else []  # the start, then the end of each lap
        self._stages: list[str] = []  # of each lap on a GPU
        self._seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, spent: str) -> None:
        """Add the time since the last lap to the stage `spent`."""
        if self._cuda:
            self._stages.append(spent)
            self._events.append(_event())
        else:
            now = time.perf_counter()
            self._seconds[spent] = self._seconds.get(spent, 0.0) + now - self._last
            self._last = now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and "total"."""
        if not self._cuda:
            return self._seconds | {"total": time.perf_counter() - self._start}
        end = _event()
        end.synchronize()
        for spent, last, event in zip(self._stages, self._events, self._events[1:], strict=False):
            self._seconds[spent] = self._seconds.get(spent, 0.0) + last.elapsed_time(event) / 1e3
        return self._seconds | {"total": self._events[0].elapsed_time(end) / 1e3}


def _event() -> torch.cuda.Event:
    """Return an event recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


TaggedTensors = list[tuple[int, torch.Tensor, int]]
"""PeerTensors with a tag each. NCCL ignores tags and relies on the order."""


def post(world: World, out: TaggedTensors, into: TaggedTensors) -> list[dist.Work]:
    """Post all messages in one batch."""
    operations = [dist.P2POp(dist.isend, tensor, peer, world.spanning, tag) for peer, tensor, tag in out]
    operations += [dist.P2POp(dist.irecv, tensor, peer, world.spanning, tag) for peer, tensor, tag in into]
    return dist.batch_isend_irecv(operations) if operations else []


@dataclass(frozen=True)
class PendingMessages:
    """Messages in transfer."""

    works: list[dist.Work]
    memory: PeerTensors  # memory of the carrier device, kept until the messages are sent or received
    landed: list[tuple[torch.Tensor, torch.Tensor]]  # (destination, memory that receives it)
    sources: list[int] = field(default_factory=list)  # ranks whose memory holds the messages that are not sent
    receipts: list[dist.Work] = field(default_factory=list)  # from ranks that read this rank's memory


class PeerChannel:
    """Posts, waits for and counts the messages of one refit.

    If the group cannot send a tensor from its own memory, the tensor goes through memory of the carrier device. For ranks that
    share a GPU this is page-locked host memory, which torch reuses for the next message.
    """

    def __init__(self, world: World, readers: Collection[int] = (), sources: Collection[int] = ()):
        """Open a channel for one refit.

        readers: ranks that map this rank's staging memory. sources: ranks whose staging memory this rank maps.
        """
        self.device = world.device
        self.sent = self.received = 0
        self._world = world
        self._readers, self._sources = readers, sources
        self._to: Counter[int] = Counter()  # messages so far, by peer
        self._from: Counter[int] = Counter()
        self._receipts_to: Counter[int] = Counter()
        self._receipts_from: Counter[int] = Counter()
        self._acknowledged = PendingMessages([], [], [])

    def post(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        """Begin to send the messages `out` and to receive into the memory `into` over the group."""
        self._count(out, into)
        return self._post(out, into)

    def post_round(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        """Begin to send and receive the messages of a round: over the group, or by notices where both ends map the memory."""
        self._count(out, into)
        readers = list(dict.fromkeys(peer for peer, _ in out if peer in self._readers))
        sources = list(dict.fromkeys(peer for peer, _ in into if peer in self._sources))
        if readers:
            self._settle()  # the round must be packed before the notices go out
        posted = self._post(
            [(peer, tensor) for peer, tensor in out if peer not in self._readers] + self._notices(readers),
            [(peer, tensor) for peer, tensor in into if peer not in self._sources] + self._notices(sources),
        )
        receipts = self._notices(readers)
        posted.memory.extend(receipts)
        posted.sources.extend(sources)
        posted.receipts.extend(post(self._world, [], _add_tags(receipts, self._receipts_from, RECEIPT)))
        return posted

    def acknowledge(self, posted: PendingMessages) -> None:
        """Send a receipt of a round to each rank in whose staging memory this rank has read messages of the round."""
        if posted.sources:
            self._settle()
            receipts = self._notices(posted.sources)
            self._acknowledged.memory.extend(receipts)
            self._acknowledged.works.extend(post(self._world, _add_tags(receipts, self._receipts_to, RECEIPT), []))

    def close(self) -> None:
        """Wait until the last receipts are sent."""
        self.wait(self._acknowledged)

    def _notices(self, peers: list[int]) -> PeerTensors:
        return [(peer, torch.zeros(1, dtype=torch.uint8, device=self._world.carrier)) for peer in peers]

    def _count(self, out: PeerTensors, into: PeerTensors) -> None:
        self.sent += sum(tensor.numel() for _, tensor in out)
        self.received += sum(tensor.numel() for _, tensor in into)

    def _post(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        carried = [(peer, self._carrier_memory(tensor)) for peer, tensor in out]
        landing = [(peer, self._carrier_memory(tensor)) for peer, tensor in into]
        for (_, at), (_, tensor) in zip(carried, out, strict=True):
            if at is not tensor:
                at.copy_(tensor, non_blocking=True)
        if any(at is not tensor for (_, at), (_, tensor) in zip(carried, out, strict=True)):
            self._settle()  # the copies must be complete before gloo reads them
        works = post(self._world, _add_tags(carried, self._to), _add_tags(landing, self._from))
        pairs = ((tensor, at) for (_, tensor), (_, at) in zip(into, landing, strict=True))
        return PendingMessages(works, carried + landing, [(tensor, at) for tensor, at in pairs if at is not tensor])

    def _carrier_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the tensor's size from which the group can send: the tensor's own if possible."""
        if tensor.device == self._world.carrier:
            return tensor
        return torch.empty_like(tensor, device=self._world.carrier, pin_memory=self.device.type == "cuda")

    def wait(self, posted: PendingMessages) -> None:
        """Block this thread until the messages are done. On a GPU this needs more than `Work.wait`, which blocks the stream."""
        for work in posted.works:
            work.wait()
        for tensor, at in posted.landed:
            tensor.copy_(at, non_blocking=True)
        if posted.works:
            self._settle()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _add_tags(mail: PeerTensors, so_far: Counter[int], first: int = TAG) -> TaggedTensors:
    """Return the messages with their tags. Both ends of a pair of ranks count its messages in the same order.

    so_far: peer -> the number of its messages so far, which this call increases. first: tag of a peer's first message.
    """
    tagged = []
    for peer, tensor in mail:
        tagged.append((peer, tensor, first + so_far[peer]))
        so_far[peer] += 1
    return tagged


class Encoding(Protocol):
    """Converts items to bytes and back. Its methods are called in the order of the rounds."""

    def pack(self, round: int) -> None:
        """Gather this rank's own items of a round, and send the receivers what they need to know before the round arrives."""

    def incoming(self, round: int) -> PeerTensors:
        """Return the memory into which to receive the messages of a round."""
        ...

    def outgoing(self, round: int) -> PeerTensors:
        """Return the messages to send in a round. Called after the round before has arrived if the rank relays items of it."""
        ...

    def apply(self, round: int) -> None:
        """Write the received items of a round."""


def run(world: World, channel: PeerChannel, plan: RankPlan, encoding: Encoding, timer: StageTimer) -> None:
    """Run all rounds of one rank."""
    relays = bool((plan.sends.source >= 0).any())
    phases = _phases(plan)
    under_way: dict[int, PendingMessages] = {}

    def wait(round: int) -> None:
        with world.phase(phases[round]):
            channel.wait(under_way[round])
        timer.lap("wire")

    def apply(round: int) -> None:
        encoding.apply(round)
        channel.acknowledge(under_way[round])
        timer.lap("wire")

    def reclaim(round: int) -> None:
        """Wait until the staging memory of a round may be overwritten."""
        posted = under_way.pop(round, None)
        if posted and posted.receipts:
            with world.phase(phases[round]):
                for work in posted.receipts:
                    work.wait()
            timer.lap("wire")

    encoding.pack(0)
    for round in range(plan.rounds):
        with world.phase(phases[round]):
            into = encoding.incoming(round)
        if relays and round:
            wait(round - 1)
            reclaim(round - 2)
        out = encoding.outgoing(round)
        timer.lap("pack")
        under_way[round] = channel.post_round(out, into)
        timer.lap("wire")  # gloo sends part of it in this thread
        if round and not relays:
            wait(round - 1)
        if round:
            apply(round - 1)
        if round + 1 < plan.rounds:
            if not relays:
                reclaim(round - 1)
            encoding.pack(round + 1)
    wait(plan.rounds - 1)
    apply(plan.rounds - 1)
    for round in sorted(under_way):
        reclaim(round)
    with world.phase(phases[-1]):
        channel.close()


def _phases(plan: RankPlan) -> list[str]:
    """Return, for each round, a description of the ranks that this rank waits for."""
    phases = []
    for round in range(plan.rounds):
        ends = []
        for word, items in (("to", plan.sends), ("from", plan.receives)):
            if peers := np.unique(items.peer[items.round == round]).tolist():
                ends.append(f"{word} rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}")
        phases.append(", ".join([f"round {round + 1} of {plan.rounds}", *ends]))
    return phases
