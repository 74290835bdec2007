"""Takes a rank through the rounds of a refit: a round is packed while the one before it is on the wire, and applied after it.

Both ends post the messages of a round in one batch, and everybody goes through the rounds in the same order, so no batch ever
waits for a later one: there is no deadlock, with gloo or with NCCL. A rank that passes on what it received in the round before
must first have it, so it waits before it posts; everybody else posts first, and the wire is never idle. Tags keep these
messages apart from other mail over the spanning group, and from each other: what is lost leaves its receiver waiting for it by
name, and is never taken for the next message.

Between ranks that both map the sender's staging (`pipeline/refit/shared_memory.py`) a round is not sent: a notice says that it
is packed, the receiver reads it where it lies, and a receipt says that it is read. A sender that has two rounds' staging waits
for the receipts of round r - 2 before it packs round r. A receiver applies and acknowledges a round before it waits for
receipts of its own, so ranks that relay in a ring never wait for each other in a circle.

Left out: what the messages hold (an `Encoding`: `pipeline/refit/full.py`, `pipeline/refit/delta.py`), and timeouts, which are
the watchdog's: it names the phase, which says whom the rank waits for.
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

from pipeline.refit.tables import RankPlan
from pipeline.world import World

TAG = 1  # the first; other mail over the spanning group has 0
RECEIPT = 1 << 30  # the first of receipts, which go the other way than what they are for

PeerTensors = list[tuple[int, torch.Tensor]]
"""(the other end's global rank, contiguous uint8), in the order in which both ends post them."""


class StageTimer:
    """Adds up seconds by what they were spent on; on a GPU those of the current stream."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._start = self._last = self._now()

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, spent: str) -> None:
        """All since the last lap went into `spent`."""
        now = self._now()
        if self._cuda:
            self._laps.append((spent, now))
        else:
            self._seconds[spent] = self._seconds.get(spent, 0.0) + now - self._last
            self._last = now

    def seconds(self) -> dict[str, float]:
        """By what was given to `lap`, and "total"."""
        end = self._now()
        if not self._cuda:
            return self._seconds | {"total": end - self._start}
        end.synchronize()
        last = self._start
        for spent, event in self._laps:
            self._seconds[spent] = self._seconds.get(spent, 0.0) + last.elapsed_time(event) / 1e3
            last = event
        return self._seconds | {"total": self._start.elapsed_time(end) / 1e3}


TaggedTensors = list[tuple[int, torch.Tensor, int]]
"""PeerTensors with a tag each; NCCL knows none and goes by the order alone."""


def post(world: World, out: TaggedTensors, into: TaggedTensors) -> list[dist.Work]:
    """In one batch."""
    operations = [dist.P2POp(dist.isend, tensor, peer, world.spanning, tag) for peer, tensor, tag in out]
    operations += [dist.P2POp(dist.irecv, tensor, peer, world.spanning, tag) for peer, tensor, tag in into]
    return dist.batch_isend_irecv(operations) if operations else []


@dataclass(frozen=True)
class PendingMessages:
    """Messages on their way, and what they are received into, where that is not where they belong."""

    works: list[dist.Work]
    held: PeerTensors  # in the carrier's memory, which must live until they are sent or received
    landed: list[tuple[torch.Tensor, torch.Tensor]]  # (where it belongs, where it is received)
    sources: list[int] = field(default_factory=list)  # ranks in whose memory the rest lies
    receipts: list[dist.Work] = field(default_factory=list)  # of ranks that read in this rank's memory


class PeerChannel:
    """Posts, waits, and counts bytes, of one refit. What the group cannot carry from where it lies goes through the carrier's
    memory: with ranks that share a GPU through page-locked host memory, which torch keeps for the next message."""

    def __init__(self, world: World, readers: Collection[int] = (), sources: Collection[int] = ()):
        """readers: ranks that map what this rank stages. sources: ranks of which this rank maps what they stage."""
        self.device = world.device
        self.sent = self.received = 0
        self._world = world
        self._readers, self._sources = readers, sources
        self._to: Counter[int] = Counter()  # messages so far, by their other end
        self._from: Counter[int] = Counter()
        self._receipts_to: Counter[int] = Counter()
        self._receipts_from: Counter[int] = Counter()
        self._acknowledged = PendingMessages([], [], [])

    def post(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        """Send and receive over the group."""
        self._count(out, into)
        return self._post(out, into)

    def post_round(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        """Send and receive what a round packs: over the group, or by a notice where both ends map it."""
        self._count(out, into)
        readers = list(dict.fromkeys(peer for peer, _ in out if peer in self._readers))
        sources = list(dict.fromkeys(peer for peer, _ in into if peer in self._sources))
        if readers:
            self._settle()  # it is packed before they are told
        posted = self._post(
            [(peer, tensor) for peer, tensor in out if peer not in self._readers] + self._notices(readers),
            [(peer, tensor) for peer, tensor in into if peer not in self._sources] + self._notices(sources),
        )
        receipts = self._notices(readers)
        posted.held.extend(receipts)
        posted.sources.extend(sources)
        posted.receipts.extend(post(self._world, [], _tagged(receipts, self._receipts_from, RECEIPT)))
        return posted

    def acknowledge(self, posted: PendingMessages) -> None:
        """Tell the ranks in whose memory a round lay that it is read."""
        if posted.sources:
            self._settle()
            receipts = self._notices(posted.sources)
            self._acknowledged.held.extend(receipts)
            self._acknowledged.works.extend(post(self._world, _tagged(receipts, self._receipts_to, RECEIPT), []))

    def close(self) -> None:
        """Wait until the last receipts are sent."""
        self.wait(self._acknowledged)

    def _notices(self, peers: list[int]) -> PeerTensors:
        return [(peer, torch.zeros(1, dtype=torch.uint8, device=self._world.carrier)) for peer in peers]

    def _count(self, out: PeerTensors, into: PeerTensors) -> None:
        self.sent += sum(tensor.numel() for _, tensor in out)
        self.received += sum(tensor.numel() for _, tensor in into)

    def _post(self, out: PeerTensors, into: PeerTensors) -> PendingMessages:
        carried = [(peer, self._carried(tensor)) for peer, tensor in out]
        landing = [(peer, self._carried(tensor)) for peer, tensor in into]
        for (_, at), (_, tensor) in zip(carried, out, strict=True):
            if at is not tensor:
                at.copy_(tensor, non_blocking=True)
        if any(at is not tensor for (_, at), (_, tensor) in zip(carried, out, strict=True)):
            self._settle()  # the copies are made before gloo reads them
        works = post(self._world, _tagged(carried, self._to), _tagged(landing, self._from))
        pairs = ((tensor, at) for (_, tensor), (_, at) in zip(into, landing, strict=True))
        return PendingMessages(works, carried + landing, [(tensor, at) for tensor, at in pairs if at is not tensor])

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the tensor's size from which the group carries: its own where that will do."""
        if tensor.device == self._world.carrier:
            return tensor
        return torch.empty_like(tensor, device=self._world.carrier, pin_memory=self.device.type == "cuda")

    def wait(self, posted: PendingMessages) -> None:
        """Until they are done; on a GPU too, where `Work.wait` alone lets this thread run ahead of what it has posted."""
        for work in posted.works:
            work.wait()
        for tensor, at in posted.landed:
            tensor.copy_(at, non_blocking=True)
        if posted.works:
            self._settle()

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _tagged(mail: PeerTensors, so_far: Counter[int], first: int = TAG) -> TaggedTensors:
    """Both ends count the messages between them in the same order."""
    tagged = []
    for peer, tensor in mail:
        tagged.append((peer, tensor, first + so_far[peer]))
        so_far[peer] += 1
    return tagged


class Encoding(Protocol):
    """How items become bytes and bytes items. Rounds come in order."""

    def pack(self, round: int) -> None:
        """Gather what this rank sends of its own in a round, and tell the receivers what they must know before it comes."""

    def incoming(self, round: int) -> PeerTensors:
        """Where what comes in a round shall be received."""

    def outgoing(self, round: int) -> PeerTensors:
        """What is sent in a round. Where the rank relays, the round before has arrived."""

    def apply(self, round: int) -> None:
        """Write what came in a round."""


def run(world: World, channel: PeerChannel, plan: RankPlan, encoding: Encoding, timer: StageTimer) -> None:
    """All rounds of one rank."""
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
        """Wait until the staging of a round may be written to again."""
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
        timer.lap("wire")  # gloo sends in this thread what it can
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
    """What a rank waits for in each round, in words."""
    phases = []
    for round in range(plan.rounds):
        ends = []
        for word, items in (("to", plan.sends), ("from", plan.receives)):
            if peers := np.unique(items.peer[items.round == round]).tolist():
                ends.append(f"{word} rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}")
        phases.append(", ".join([f"round {round + 1} of {plan.rounds}", *ends]))
    return phases
