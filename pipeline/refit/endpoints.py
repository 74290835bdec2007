"""The two endpoints of a rank in a refit: the items that it sends and receives, where they are stored, and their messages.

A message is all items of one round from one rank to another, in the order of the plan. It is sent in parts. An item of `DIRECT`
bytes or more is a part of its own, so that each end can skip its staging memory if the item is contiguous in the transfer
dtype. Smaller consecutive items share a part. Items begin at multiples of `ALIGNMENT` bytes. If both ends map the sender's
staging memory (`shared_memory.py`), the sender stages all items and the receiver reads them there.

The layout of the messages is computed once. In a refit, each item costs only a view, a copy and a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from pipeline.boxes import Region
from pipeline.generate.generate_backend import WeightUpdate
from pipeline.models.precision import served_dtype
from pipeline.refit.digest import WORD_BYTES, Digest, RefitError
from pipeline.refit.tables import RankPlan, TransferItems
from pipeline.train.train_backend import TrainBackend

ALIGNMENT = WORD_BYTES  # bytes: the digest reads items in place
DIRECT = (
    1 << 18
)  # bytes; from this size on a copy costs more than a message with gloo: python -m tests.benchmarks.refit_transfer


class Message(NamedTuple):
    """The items that one rank sends to another in a round."""

    peer: int
    items: list[int]  # rows of the rank's `TransferItems`
    starts: list[int]  # byte offsets in the message: of each item, and of the message's end
    parts: list[tuple[int, int]]  # indices into `items`: first of a part, and one past its last
    at: int  # byte offset in the round's staging memory, or in the peer's if this rank reads it there


class Endpoint:
    """The base of SendEndpoint and ReceiveEndpoint."""

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
        """Compute shapes, strides and messages of all items.

        rows: for each item, the index of the region with its tensor. regions: the regions of the rank's table, in its order.
        """
        self.items = items
        self.regions = [regions[row] if row >= 0 else None for row in items.row.tolist()]
        self.dtypes = [served_dtype(regions[row].name, precision) for row in rows]
        dims = [len(region.box.size) if region else 0 for region in self.regions]
        self.shapes = [tuple(size[:d]) for size, d in zip(items.size.tolist(), dims, strict=True)]
        self.numels = items.size.prod(axis=1).tolist()
        self.strides, self._offsets = _locations(items, regions, dims)
        self.sizes = [numel * dtype.itemsize for numel, dtype in zip(self.numels, self.dtypes, strict=True)]
        self.messages = _messages(items, self.sizes, rounds)
        self.digest = Digest(items, dims, self.dtypes, device) if digest else None
        self.mapped_peers: Collection[int] = ()  # ranks that exchange messages with this one through memory that both map
        self._device = device
        self._staging: list[torch.Tensor] = []

    @property
    def peers(self) -> list[int]:
        """Ranks at the other ends, ascending."""
        return np.unique(self.items.peer).tolist()

    @property
    def round_bytes(self) -> int:
        """Bytes of the largest round that this rank stages."""
        staged = ([message for message in messages if self.stages(message)] for messages in self.messages)
        return max((messages[-1].at + messages[-1].starts[-1] for messages in staged if messages), default=0)

    def stages(self, message: Message) -> bool:
        """Return whether the message needs staging memory of this rank's own."""
        return True

    def allocate(self, buffers: int, memory: torch.Tensor | None = None) -> None:
        """Allocate staging memory for `buffers` rounds, kept from one refit to the next.

        memory: memory to use instead, [buffers * round_bytes] uint8.
        """
        size = self.round_bytes
        if memory is None:
            memory = torch.empty(buffers * size, dtype=torch.uint8, device=self._device)
        self._staging = list(memory.view(buffers, size))

    def room(self, message: Message, round: int) -> torch.Tensor:
        """Return the memory in which a message is packed or received, [bytes] uint8."""
        return self._staging[round % len(self._staging)][message.at : message.at + message.starts[-1]]

    def staging_view(self, message: Message, position: int, round: int) -> torch.Tensor:
        """Return the staging memory of an item, [numel] of the transfer dtype."""
        start, item = message.starts[position], message.items[position]
        return self.room(message, round)[start : start + self.sizes[item]].view(self.dtypes[item])

    def part(self, message: Message, first: int, last: int, round: int) -> torch.Tensor:
        """Return the staging memory of a part, [bytes] uint8."""
        end = message.starts[last - 1] + self.sizes[message.items[last - 1]]
        return self.room(message, round)[message.starts[first] : end]

    def _region(self, item: int) -> Region:
        region = self.regions[item]
        assert region is not None  # only relayed items have none
        return region

    def _view(self, tensor: torch.Tensor, item: int) -> torch.Tensor:
        return tensor.as_strided(self.shapes[item], self.strides[item], tensor.storage_offset() + self._offsets[item])

    def hash(self, item: int, values: torch.Tensor) -> None:
        """Add an item to the digest if the plan makes this rank hash it. values: the item's values, in its shape on disk."""
        if self.digest and self.digest.hashed[item]:
            self.digest.add(item, values)

    def in_one_piece(self, item: int, view: torch.Tensor) -> bool:
        """Return whether the view is contiguous in the transfer dtype, so that it can be sent or received directly."""
        return view.dtype == self.dtypes[item] and view.is_contiguous()


class SendEndpoint(Endpoint):
    """A rank's outgoing parts. A train rank sends its own tensors; a generate rank relays items of the round before."""

    def __init__(self, plan: RankPlan, *arguments, **settings):
        relayed = np.flatnonzero(plan.sends.source >= 0)
        rows = plan.sends.row.copy()
        rows[relayed] = plan.receives.row[plan.sends.source[relayed]]
        super().__init__(plan.sends, rows.tolist(), plan.rounds, *arguments, **settings)
        self.sources = plan.sends.source.tolist()
        self.relays = any(source >= 0 for source in self.sources)
        for item in relayed.tolist():
            arrival, departure = plan.receives.round[self.sources[item]], plan.sends.round[item]
            if arrival != departure - 1:
                raise ValueError(f"an item of round {arrival} is relayed in round {departure}; expected the next round")
            self.numels[item] = int(plan.receives.size[self.sources[item]].prod())

    def bind(self, backend: TrainBackend) -> None:
        """Read this refit's items from the tensors of `backend`."""
        self._local = functools.cache(backend.local_tensor)

    def staging_offsets(self) -> dict[int, list[int]]:
        """Return receiver -> byte offset of its message of each round in the whole staging memory; -1 where it has none."""
        offsets = {peer: [-1] * len(self.messages) for peer in self.peers}
        for round, messages in enumerate(self.messages):
            start = round % len(self._staging) * len(self._staging[0])
            for message in messages:
                offsets[message.peer][round] = start + message.at
        return offsets

    def view(self, item: int) -> torch.Tensor:
        """Return a view of an item in this rank's tensors, in its shape on disk. Not for items that the rank relays."""
        return self._view(self._local(self._region(item).tensor), item)


class ReceiveEndpoint(Endpoint):
    """The incoming parts of an engine's rank, unit by unit."""

    def __init__(self, plan: RankPlan, units: Sequence[str], *arguments: Any, **settings: Any):
        """Compute the items to receive, and the round after which to finish each unit. units: the unit of each region."""
        super().__init__(plan.receives, plan.receives.row.tolist(), plan.rounds, *arguments, **settings)
        rows: list[int] = plan.receives.row.tolist()
        self._unit_of = [units[row] for row in rows] if rows else []
        names = list(dict.fromkeys(units))
        self._finished: list[list[str]] = [[] for _ in range(plan.rounds)]
        for unit in plan.order.tolist():
            self._finished[int(plan.finish_round[unit])].append(names[unit])
        self._update: WeightUpdate
        self._memories: dict[int, torch.Tensor] = {}

    def read_from(self, memories: Mapping[int, tuple[torch.Tensor, Sequence[int]]]) -> None:
        """Read the messages of some senders in the senders' own staging memory. Call this before `allocate`.

        memories: sender -> (its staging memory, [bytes] uint8; its `SendEndpoint.staging_offsets` for this rank).
        """
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

    @override
    def stages(self, message: Message) -> bool:
        return message.peer not in self._memories

    @override
    def room(self, message: Message, round: int) -> torch.Tensor:
        if self.stages(message):
            return super().room(message, round)
        return self._memories[message.peer][message.at : message.at + message.starts[-1]]

    def bind(self, update: WeightUpdate) -> None:
        """Write this refit's items through `update`."""
        self._update = update

    def view(self, item: int) -> torch.Tensor:
        """Return the memory to write an item to, in its shape on disk.

        Raises RefitError if its dtype cannot hold the transfer dtype.
        """
        region = self._region(item)
        target = self._update.target(self._unit_of[item], region.tensor)
        if torch.promote_types(target.dtype, self.dtypes[item]) != target.dtype:
            raise RefitError(
                f"{region.name} is sent as {self.dtypes[item]} (policy.precision),"
                f" which the engine's {region.tensor} in {target.dtype} cannot hold"
            )
        return self._view(target, item)

    def in_place(self, item: int) -> bool:
        """Return whether the engine reads the very tensor to which the item is written."""
        return self._update.in_place(self._unit_of[item])

    def finish(self, round: int) -> None:
        """Finish the units that are complete on every rank of the engine after this round."""
        for unit in self._finished[round]:
            self._update.finish(unit)


def _locations(items: TransferItems, regions: Sequence[Region], dims: Sequence[int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return (strides, offsets) of all items in their regions' tensors, in entries. Undefined for relayed items."""
    corner = np.zeros((len(regions) + 1, items.offset.shape[1]), np.int64)
    strides, start = np.zeros_like(corner), np.zeros(len(regions) + 1, np.int64)
    for i, region in enumerate(regions):  # the last row is for relays, whose `row` is -1
        corner[i, : len(region.strides)], strides[i, : len(region.strides)] = region.box.offset, region.strides
        start[i] = region.offset
    along = strides[items.row]
    offsets = start[items.row] + ((items.offset - corner[items.row]) * along).sum(axis=1)
    return [tuple(steps[:d]) for steps, d in zip(along.tolist(), dims, strict=True)], offsets.tolist()


def _messages(items: TransferItems, sizes: Sequence[int], rounds: int) -> list[list[Message]]:
    """Return the messages of each round. sizes: bytes of the items."""
    messages: list[list[Message]] = [[] for _ in range(rounds)]
    order = np.lexsort((items.peer, items.round))  # stable, to keep the order within a message
    ends = np.stack([items.round[order], items.peer[order]], axis=1)
    cuts = np.flatnonzero((ends[1:] != ends[:-1]).any(axis=1)) + 1
    for members in np.split(order, cuts) if len(order) else ():
        round, peer = int(items.round[members[0]]), int(items.peer[members[0]])
        before = messages[round][-1] if messages[round] else None
        message = Message(peer, members.tolist(), [0], [], before.at + before.starts[-1] if before else 0)
        apart = True  # the next item begins a part
        for position, item in enumerate(message.items):
            message.starts.append(message.starts[-1] + padded_size(sizes[item]))
            alone = sizes[item] >= DIRECT
            if alone or apart:
                message.parts.append((position, position + 1))
            else:
                message.parts[-1] = (message.parts[-1][0], position + 1)
            apart = alone
        messages[round].append(message)
    return messages


def padded_size(size: int) -> int:
    """Return `size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
