"""A refit's schedule: every flow of chunks from train ranks to generate ranks, in a few columns for any number of ranks.

A chunk is a list of pieces (boxes) that the same train ranks hold and that one rank of an engine needs for one unit. All
engines need the same chunks. Engines form sharing groups, and the engines of a group form a ring. A flow is the transfer of one
chunk to one group: in round r, a train rank sends the chunk to the engine at ring position `head`; in round r + 1, this engine
forwards it to the next engine; and so on around the ring.

    chunks: `unit`, `receiver` (rank in the engine), `bytes`     [c], in the order of time
    flows:  `source` (global rank), `round`, `head`              [c, groups]

    RefitSchedule.rank(rank) -> RankPlan           one rank's part
    RefitSchedule.plan() -> RefitPlan              every rank's part
    RefitSchedule.train_messages() -> Traffic      messages of train ranks: (round, source, target, bytes), a row for each flow
    RefitSchedule.forwarded_messages() -> Traffic  messages between engines of a group, a row each
    RefitSchedule.traffic() -> (out, in)           bytes that each rank sends and receives in each round
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.refit import intersection
from pipeline.refit.tables import RankPlan, RefitPlan, TransferItems


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages, with a row for each message."""

    round: np.ndarray  # [n] int64
    source: np.ndarray  # [n] int32 global rank
    target: np.ndarray  # [n] int32 global rank
    bytes: np.ndarray  # [n] int64


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in the order of time. Chunk c has the rows `first[c]` to `first[c] + count[c]` of `row` and of `piece`."""

    unit: np.ndarray  # [c] int32: index into NeededBoxes.units
    receiver: np.ndarray  # [c] int32: rank in the engine
    holders: np.ndarray  # [c] int32: holder set
    stream: np.ndarray  # [c] int64: equal for equal holders and receiver
    bytes: np.ndarray  # [c] int64
    first: np.ndarray  # [c] int64
    count: np.ndarray  # [c] int64
    row: np.ndarray  # [p] int32: row of NeededBoxes
    piece: np.ndarray  # [p] int32: index into Pieces

    def __len__(self) -> int:
        return len(self.unit)


@dataclass(frozen=True)
class RefitSchedule:
    """The whole transfer, in columns."""

    held: intersection.HeldBoxes
    needed: intersection.NeededBoxes
    pieces: intersection.Pieces
    chunks: Chunks
    engines: np.ndarray  # [engines, ranks of an engine] int32 global ranks
    groups: list[list[int]]  # of engines, in the order of their ring
    width: np.ndarray  # [tensors] int64: bytes of an entry of each tensor on disk, on the wire
    bucket_bytes: int  # the most that a rank sends in a round, and the most that it receives
    lower_bound_bytes: float  # bytes that some rank must send or receive under any plan for these groups
    source: np.ndarray  # [chunks, groups] int32
    round: np.ndarray  # [chunks, groups] int32
    head: np.ndarray  # [chunks, groups] int16

    @cached_property
    def rounds(self) -> int:
        """Number of rounds of the transfer: in the last one, the last member of a ring receives its last chunk."""
        last = self.round.max(0, initial=-1) + [len(group) - 1 for group in self.groups]
        return int(last.max()) + 1 if len(self.chunks) else 0

    @cached_property
    def member(self) -> dict[int, tuple[int, int]]:
        """Generate rank -> (its engine, its rank in the engine)."""
        return {int(rank): (e, g) for e, engine in enumerate(self.engines) for g, rank in enumerate(engine)}

    @cached_property
    def ring(self) -> dict[int, tuple[int, int]]:
        """Engine -> (its group, its position in the group's ring)."""
        return {engine: (q, p) for q, group in enumerate(self.groups) for p, engine in enumerate(group)}

    @cached_property
    def arrival(self) -> np.ndarray:
        """Round in which each engine receives each chunk, [chunks, engines] int32."""
        arrival = np.empty((len(self.engines), len(self.chunks)), np.int32)  # row-wise: faster for thousands of engines
        for engine, (q, p) in self.ring.items():
            arrival[engine] = self.round[:, q] + (p - self.head[:, q]) % len(self.groups[q])
        return arrival.T

    @cached_property
    def finish(self) -> np.ndarray:
        """Round that brings the last chunk of each unit to each engine, [units, engines] int32."""
        order = np.argsort(self.chunks.unit, kind="stable")
        first = np.flatnonzero(intersection.changes(self.chunks.unit[order]))
        finish = np.zeros((len(self.needed.units), len(self.engines)), np.int32)
        finish[self.chunks.unit[order[first]]] = np.maximum.reduceat(self.arrival[order], first)
        return finish

    def train_messages(self) -> Traffic:
        """Return the messages from train ranks to the heads of groups, chunk by chunk."""
        size = np.repeat(self.chunks.bytes, len(self.groups))
        return Traffic(self.round.ravel().astype(np.int64), self.source.ravel(), self._heads.ravel(), size)

    def forwarded_messages(self) -> Traffic:
        """Return the messages between engines of a group: one for each round and receiver, with all bytes of the round.

        A rank receives only from the engine before its own on the ring, so a receiver has one source.
        """
        columns = []
        for q, group in enumerate(self.groups):
            ring, (_, forwarded) = self.engines[group], self._received_bytes(q)
            round, member, receiver = np.nonzero(forwarded)
            source, target = ring[member - 1, receiver], ring[member, receiver]
            columns.append((round, source, target, forwarded[round, member, receiver]))
        return Traffic(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    def _received_bytes(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that the ranks of group q receive in each round (from train ranks, from the engine before).

        Both are [rounds, members, ranks of an engine] int64. The bytes that a head receives in round r reach the k-th engine
        after the head in round r + k. So the cost depends on the number of chunks but not on the number of hops.
        """
        members, size = len(self.groups[q]), self.engines.shape[1]
        cell = (self.round[:, q].astype(np.int64) * members + self.head[:, q]) * size + self.chunks.receiver
        from_train = np.bincount(cell, self.chunks.bytes, self.rounds * members * size).astype(np.int64)
        from_train = from_train.reshape(self.rounds, members, size)
        forwarded = np.zeros_like(from_train)
        for hop in range(1, members):
            forwarded[hop:] += np.roll(from_train, hop, 1)[:-hop]
        return from_train, forwarded

    # ---- one rank -------------------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> RankPlan:
        """Return one rank's part. Raises KeyError if the rank neither trains nor generates."""
        if rank in self.held.rows:
            empty = np.zeros(0, np.int32)
            return RankPlan(self.rounds, self._sends(rank), self._items(empty, empty, empty)[0], empty, empty)
        engine, g = self.member[rank]
        q, p = self.ring[engine]
        ring = self.engines[self.groups[q], g]
        chunk = np.flatnonzero(self.chunks.receiver == g)
        hop = (p - self.head[chunk, q]) % len(ring)
        arrival = self.arrival[chunk, engine]
        before, after = ring[p - 1], ring[(p + 1) % len(ring)]
        receives, pieces_in, _ = self._items(chunk, arrival, np.where(hop == 0, self.source[chunk, q], before))
        receives.row[:] = self.needed.row[self.chunks.row[pieces_in]]
        receives.key[:] = self.pieces.needed_box[self.chunks.piece[pieces_in]]
        forwards = hop < len(ring) - 1  # the last engine of the ring forwards nothing
        sends, pieces_out, _ = self._items(chunk[forwards], arrival[forwards] + 1, np.full(np.count_nonzero(forwards), after))
        order = np.argsort(pieces_in)
        sends.source[:] = order[np.searchsorted(pieces_in, pieces_out, sorter=order)]
        return RankPlan(self.rounds, sends, receives, *self._units(engine, g))

    def _sends(self, rank: int) -> TransferItems:
        """Return the items that a train rank sends."""
        order, source = self._by_source
        chunk, q = np.divmod(order[slice(*np.searchsorted(source, (rank, rank + 1)))], len(self.groups))
        items, piece, flow = self._items(chunk, self.round[chunk, q], self._heads[chunk, q])
        box = self.chunks.piece[piece]
        rows = self.held.rows[rank]
        order = np.argsort(rows.box, kind="stable")
        items.row[:] = rows.row[order[np.searchsorted(rows.box, self.pieces.held_box[box], sorter=order)]]
        # Hash each box once: on its way to the first rank that needs it, in one group. The groups take turns by chunk.
        hashed = (chunk % len(self.groups) == q)[flow] & self._first_needing[self.chunks.row[piece]]
        items.key[:] = np.where(hashed, self.pieces.needed_box[box], -1)
        return items

    def _items(self, chunk: np.ndarray, number: np.ndarray, peer: np.ndarray) -> tuple[TransferItems, np.ndarray, np.ndarray]:
        """Return (the pieces of these chunks as items; the piece of each item; the index into `chunk` of each item).

        chunk: [n], chunk numbers. number: [n], the round of each chunk. peer: [n], the rank at the other end.
        """
        order = intersection.lexicographic([number, peer, chunk])
        ordered, piece = intersection.expand(self.chunks.first[chunk[order]], self.chunks.count[chunk[order]])
        flow = order[ordered]
        box = self.chunks.piece[piece]
        absent = np.full((3, len(flow)), -1, np.int32)
        items = TransferItems(
            round=number[flow].astype(np.int32),
            peer=peer[flow].astype(np.int32),
            row=absent[0],
            offset=self.pieces.offset[box],
            size=self.pieces.size[box],
            key=absent[1],
            source=absent[2],
        )
        return items, piece, flow

    def _units(self, engine: int, g: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (finish_round, order) of the units that a rank of the engine needs."""
        units = self.needed.rank_units[g]
        finish = self.finish[units, engine]
        return finish, np.lexsort((units, finish)).astype(np.int32)

    @cached_property
    def _by_source(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the flows, sorted by source; their sources), [chunks * groups] each."""
        source = self.source.ravel()
        order = np.argsort(source, kind="stable")
        return order, source[order]

    @cached_property
    def _heads(self) -> np.ndarray:
        """Rank that receives each chunk from its source, [chunks, groups] int32."""
        first = (self.engines[group][self.head[:, q], self.chunks.receiver] for q, group in enumerate(self.groups))
        return np.stack(list(first), 1)

    @cached_property
    def _first_needing(self) -> np.ndarray:
        """True for the first row of `needed` that needs each box, [rows] bool."""
        first = np.zeros(len(self.needed.box), bool)
        first[np.unique(self.needed.box, return_index=True)[1]] = True
        return first

    # ---- all ranks ------------------------------------------------------------------------------------------------------

    def plan(self) -> RefitPlan:
        """Return every rank's part, with the digest keys."""
        ranks = [*self.held.rows, *self.member]
        return RefitPlan(
            {rank: self.rank(rank) for rank in ranks},
            keys=len(self.needed.boxes),
            key_tensor=self.needed.boxes.tensor,
            chunk_bytes=int((self.pieces.numel * self.width[self.needed.boxes.tensor[self.pieces.needed_box]]).max(initial=0)),
            bucket_bytes=self.bucket_bytes,
        )

    def traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (bytes out, bytes in) of each global rank in each round, [rounds, ranks] int64 each."""
        ranks, messages = 1 + max([*self.held.rows, *self.member]), self.train_messages()
        out = np.bincount(messages.round * ranks + messages.source, messages.bytes, self.rounds * ranks).astype(np.int64)
        out = out.reshape(self.rounds, ranks)
        into = np.zeros_like(out)
        for q, group in enumerate(self.groups):
            ring, (from_train, forwarded) = self.engines[group], self._received_bytes(q)
            into[:, ring] = from_train + forwarded
            out[:, np.roll(ring, 1, 0)] = forwarded
        return out, into
