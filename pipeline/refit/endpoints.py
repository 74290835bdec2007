"""The two sides of a rank in a refit: what it sends and what it receives, where that lies, and in which messages.

A message is all items of one round from one rank to another, in the order of the plan. It travels in parts: an item of
`DIRECT` bytes or more is a part of its own, so that each end may leave out its staging where the item lies in one piece in the
wire's type; smaller ones that follow each other share a part. Items begin at multiples of `ALIGNMENT` bytes. Where both ends
map the sender's staging (`pipeline/refit/shared_memory.py`), the sender stages all items and the receiver reads them there.

All of this is computed once. Per item and refit there remain a view, a copy and a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pipeline.boxes import Region
from pipeline.generate.base import WeightUpdate
from pipeline.models.precision import served_dtype
from pipeline.refit.digest import WORD_BYTES, Digest, RefitError
from pipeline.refit.tables import RankPlan, TransferItems
from pipeline.train.base import TrainBackend

ALIGNMENT = WORD_BYTES  # bytes: the digest reads items in place
DIRECT = 1 << 18  # bytes; from here on a copy costs more than a message, with gloo: python -m tests.benchmarks.refit_transfer


class Message(NamedTuple):
    """The items that one rank sends to another in a round."""

    peer: int
    items: list[int]  # rows of the rank's `TransferItems`
    starts: list[int]  # bytes into the message: where each item begins, and where the message ends
    parts: list[tuple[int, int]]  # places in `items`: the first of a part, and the one behind its last
    at: int  # bytes into the round's staging, or into the peer's memory where this rank reads it there


class Endpoint:
    """What both sides have in common."""

    def __init__(
        self,
        items: TransferItems,
        rows: Sequence[int],
        rounds: int,
        regions: Sequence[Region],
        precision: torch.dtype,
        device: torch.device,
        digest: bool,
    ):
        """rows: of each item, the region that says which tensor it is of. regions: of the rank's table, in its order."""
        self.items = items
        self.regions = [regions[row] if row >= 0 else None for row in items.row.tolist()]
        self.dtypes = [served_dtype(regions[row].name, precision) for row in rows]
        dims = [len(held.box.size) if held else 0 for held in self.regions]
        self.shapes = [tuple(size[:d]) for size, d in zip(items.size.tolist(), dims, strict=True)]
        self.numels = items.size.prod(axis=1).tolist()
        self.strides, self._offsets = _places(items, regions, dims)
        self.sizes = [numel * dtype.itemsize for numel, dtype in zip(self.numels, self.dtypes, strict=True)]
        self.messages = _messages(items, self.sizes, rounds)
        self.digest = Digest(items, dims, self.dtypes, device) if digest else None
        self.mapped_peers: Collection[int] = ()  # ranks whose messages, from here or to here, lie in memory that both ends map
        self._device = device
        self._staging: list[torch.Tensor] = []

    @property
    def peers(self) -> list[int]:
        """Return the ranks at the other ends."""
        return np.unique(self.items.peer).tolist()

    @property
    def round_bytes(self) -> int:
        """Return the bytes that this rank stages of the largest round."""
        staged = ([message for message in messages if self.stages(message)] for messages in self.messages)
        return max((messages[-1].at + messages[-1].starts[-1] for messages in staged if messages), default=0)

    def stages(self, message: Message) -> bool:
        """Return whether the message has a place in this rank's own staging."""
        return True

    def allocate(self, buffers: int, memory: torch.Tensor | None = None) -> None:
        """Take memory for as many rounds at a time, kept from one refit to the next. memory: [buffers * round_bytes] uint8."""
        size = self.round_bytes
        if memory is None:
            memory = torch.empty(buffers * size, dtype=torch.uint8, device=self._device)
        self._staging = list(memory.view(buffers, size))

    def room(self, message: Message, round: int) -> torch.Tensor:
        """Return the memory in which a message is packed, or received, [bytes] uint8."""
        return self._staging[round % len(self._staging)][message.at : message.at + message.starts[-1]]

    def staged(self, message: Message, place: int, round: int) -> torch.Tensor:
        """The staging of an item, [numel] of the wire's type."""
        start, item = message.starts[place], message.items[place]
        return self.room(message, round)[start : start + self.sizes[item]].view(self.dtypes[item])

    def part(self, message: Message, first: int, last: int, round: int) -> torch.Tensor:
        """The staging of a part, [bytes] uint8."""
        end = message.starts[last - 1] + self.sizes[message.items[last - 1]]
        return self.room(message, round)[message.starts[first] : end]

    def _view(self, tensor: torch.Tensor, item: int) -> torch.Tensor:
        return tensor.as_strided(self.shapes[item], self.strides[item], tensor.storage_offset() + self._offsets[item])

    def hash(self, item: int, values: torch.Tensor) -> None:
        """values: of the item, in its shape on disk."""
        if self.digest and self.digest.hashed[item]:
            self.digest.add(item, values)

    def in_one_piece(self, item: int, view: torch.Tensor) -> bool:
        """Whether this memory is what is on the wire."""
        return view.dtype == self.dtypes[item] and view.is_contiguous()


class SendEndpoint(Endpoint):
    """Train: parts of its own tensors. Generate: what it received in the round before (`TransferItems.source`)."""

    def __init__(self, plan: RankPlan, *arguments, **settings):
        relayed = np.flatnonzero(plan.sends.source >= 0)
        rows = plan.sends.row.copy()
        rows[relayed] = plan.receives.row[plan.sends.source[relayed]]
        super().__init__(plan.sends, rows.tolist(), plan.rounds, *arguments, **settings)
        self.sources = plan.sends.source.tolist()
        self.relays = any(source >= 0 for source in self.sources)
        for item in relayed.tolist():
            came, goes = plan.receives.round[self.sources[item]], plan.sends.round[item]
            if came != goes - 1:
                raise ValueError(f"an item that comes in round {came} is to be passed on in round {goes}, not the next one")
            self.numels[item] = int(plan.receives.size[self.sources[item]].prod())

    def bind(self, backend: TrainBackend) -> None:
        """For one refit."""
        self._local = functools.cache(backend.local_tensor)

    def places(self) -> dict[int, list[int]]:
        """Return, by receiver, the bytes into the whole staging at which its message of each round begins; -1: it has none."""
        found = {peer: [-1] * len(self.messages) for peer in self.peers}
        for round, messages in enumerate(self.messages):
            start = round % len(self._staging) * len(self._staging[0])
            for message in messages:
                found[message.peer][round] = start + message.at
        return found

    def view(self, item: int) -> torch.Tensor:
        """The item where it lies in this rank's tensors, in its shape on disk. Only where the rank does not relay it."""
        return self._view(self._local(self.regions[item].tensor), item)


class ReceiveEndpoint(Endpoint):
    """What an engine's rank takes, unit by unit."""

    def __init__(self, plan: RankPlan, units: Sequence[str], *arguments, **settings):
        """units: for each region."""
        super().__init__(plan.receives, plan.receives.row.tolist(), plan.rounds, *arguments, **settings)
        self._units = [units[row] for row in plan.receives.row.tolist()] if len(plan.receives) else []
        names = list(dict.fromkeys(units))
        self._finished: list[list[str]] = [[] for _ in range(plan.rounds)]
        for unit in plan.order.tolist():
            self._finished[int(plan.finish_round[unit])].append(names[unit])
        self._update: WeightUpdate
        self._memories: dict[int, torch.Tensor] = {}

    def read_from(self, memories: Mapping[int, tuple[torch.Tensor, Sequence[int]]]) -> None:
        """Read what these ranks send where they stage it. Called before `allocate`. memories: of each rank its staging, [bytes]
        uint8, and this rank's part of its `SendEndpoint.places`."""
        self.mapped_peers = frozenset(memories)
        self._memories = {peer: memory for peer, (memory, _) in memories.items()}
        for round, messages in enumerate(self.messages):
            end = 0
            for i, message in enumerate(messages):
                if message.peer in memories:
                    messages[i] = message._replace(at=memories[message.peer][1][round])
                else:
                    messages[i] = message._replace(at=end)
                    end += message.starts[-1]

    def stages(self, message: Message) -> bool:
        return message.peer not in self._memories

    def room(self, message: Message, round: int) -> torch.Tensor:
        if self.stages(message):
            return super().room(message, round)
        return self._memories[message.peer][message.at : message.at + message.starts[-1]]

    def bind(self, update: WeightUpdate) -> None:
        """For one refit."""
        self._update = update

    def view(self, item: int) -> torch.Tensor:
        """Where the item is to be written, in its shape on disk. Raises RefitError if that cannot hold the wire's type."""
        target = self._update.target(self._units[item], self.regions[item].tensor)
        if torch.promote_types(target.dtype, self.dtypes[item]) != target.dtype:
            raise RefitError(
                f"{self.regions[item].name} comes as {self.dtypes[item]} (policy.precision),"
                f" which the engine's {self.regions[item].tensor} in {target.dtype} cannot hold"
            )
        return self._view(target, item)

    def in_place(self, item: int) -> bool:
        return self._update.in_place(self._units[item])

    def finish(self, round: int) -> None:
        """All units of which the whole engine has everything after this round."""
        for unit in self._finished[round]:
            self._update.finish(unit)


def _places(items: TransferItems, regions: Sequence[Region], dims: Sequence[int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Of each item the strides and the offset, in entries, in its region's tensor. Meaningless for what is passed on."""
    corner = np.zeros((len(regions) + 1, items.offset.shape[1]), np.int64)
    strides, start = np.zeros_like(corner), np.zeros(len(regions) + 1, np.int64)
    for i, held in enumerate(regions):  # the last row is there for relays, whose `row` is -1
        corner[i, : len(held.strides)], strides[i, : len(held.strides)] = held.box.offset, held.strides
        start[i] = held.offset
    along = strides[items.row]
    offsets = start[items.row] + ((items.offset - corner[items.row]) * along).sum(axis=1)
    return [tuple(steps[:d]) for steps, d in zip(along.tolist(), dims, strict=True)], offsets.tolist()


def _messages(items: TransferItems, sizes: Sequence[int], rounds: int) -> list[list[Message]]:
    """By round. sizes: of the items, in bytes."""
    found: list[list[Message]] = [[] for _ in range(rounds)]
    order = np.lexsort((items.peer, items.round))  # stable: the order within a message stays
    ends = np.stack([items.round[order], items.peer[order]], axis=1)
    cuts = np.flatnonzero((ends[1:] != ends[:-1]).any(axis=1)) + 1
    for members in np.split(order, cuts) if len(order) else ():
        round, peer = int(items.round[members[0]]), int(items.peer[members[0]])
        before = found[round][-1] if found[round] else None
        message = Message(peer, members.tolist(), [0], [], before.at + before.starts[-1] if before else 0)
        apart = True  # the next item begins a part
        for place, item in enumerate(message.items):
            message.starts.append(message.starts[-1] + padded(sizes[item]))
            alone = sizes[item] >= DIRECT
            if alone or apart:
                message.parts.append((place, place + 1))
            else:
                message.parts[-1] = (message.parts[-1][0], place + 1)
            apart = alone
        found[round].append(message)
    return found


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
