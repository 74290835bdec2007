"""A refit's schedule: every flow of chunks from train ranks to generate ranks, in a few columns for any number of ranks.

A chunk is a list of pieces: boxes that the same train ranks hold and that one rank of an engine needs for one unit. It is the
same for all engines. Engines form sharing groups. A flow is a chunk on its way to a group: a train rank sends it to the group's
member at ring position `head` in round r, which passes it on to the next in round r + 1, and so on around the ring.

    chunks: `unit`, `receiver` (rank in the engine), `bytes`     [c], in the order of time
    flows:  `source` (global rank), `round`, `head`              [c, groups]

    RefitSchedule.rank(rank) -> RankPlan       one rank's part
    RefitSchedule.plan() -> RefitPlan          every rank's part
    RefitSchedule.sent() -> Traffic            messages of train ranks: (round, source, target, bytes), a row for each flow
    RefitSchedule.passed() -> Traffic          messages that generate ranks pass on, a row each
    RefitSchedule.traffic() -> (out, in)       bytes of each rank in each round
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.refit import intersection
from pipeline.refit.tables import RankPlan, RefitPlan, TransferItems


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages, a row each."""

    round: np.ndarray  # [n] int64
    source: np.ndarray  # [n] int32 global rank
    target: np.ndarray  # [n] int32 global rank
    bytes: np.ndarray  # [n] int64


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in the order of time. Chunk c has the rows `first[c]` to `first[c] + count[c]` of the last two columns."""

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
    engines: np.ndarray  # [engines, ranks of each] int32 global ranks
    groups: list[list[int]]  # of engines, in the order of their ring
    width: np.ndarray  # [tensors] int64: bytes of an entry of each tensor on disk, on the wire
    bucket_bytes: int  # the most that a rank sends in a round, and the most that it receives
    lower_bound_bytes: float  # bytes that some rank must send or receive under any plan for these groups
    source: np.ndarray  # [chunks, groups] int32
    round: np.ndarray  # [chunks, groups] int32
    head: np.ndarray  # [chunks, groups] int16

    @cached_property
    def rounds(self) -> int:
        """Number of rounds, until the last member of each ring has received."""
        last = self.round.max(0, initial=-1) + [len(group) - 1 for group in self.groups]
        return int(last.max()) + 1 if len(self.chunks) else 0

    @cached_property
    def place(self) -> dict[int, tuple[int, int]]:
        """(engine, rank in the engine) of each generate rank."""
        return {int(rank): (e, g) for e, engine in enumerate(self.engines) for g, rank in enumerate(engine)}

    @cached_property
    def ring(self) -> dict[int, tuple[int, int]]:
        """(group, position in its ring) of each engine."""
        return {engine: (q, p) for q, group in enumerate(self.groups) for p, engine in enumerate(group)}

    @cached_property
    def arrival(self) -> np.ndarray:
        """Round in which the engine's rank receives the chunk, [chunks, engines] int32."""
        found = np.empty((len(self.engines), len(self.chunks)), np.int32)  # row-wise, which is faster for thousands of engines
        for engine, (q, p) in self.ring.items():
            found[engine] = self.round[:, q] + (p - self.head[:, q]) % len(self.groups[q])
        return found.T

    @cached_property
    def finish(self) -> np.ndarray:
        """Round after whose receives all ranks of the engine have the whole unit, [units, engines] int32."""
        order = np.argsort(self.chunks.unit, kind="stable")
        first = np.flatnonzero(intersection.changes(self.chunks.unit[order]))
        found = np.zeros((len(self.needed.units), len(self.engines)), np.int32)
        found[self.chunks.unit[order[first]]] = np.maximum.reduceat(self.arrival[order], first)
        return found

    def sent(self) -> Traffic:
        """Return the messages from the train ranks to the heads of the groups, chunk by chunk."""
        size = np.repeat(self.chunks.bytes, len(self.groups))
        return Traffic(self.round.ravel().astype(np.int64), self.source.ravel(), self._heads.ravel(), size)

    def passed(self) -> Traffic:
        """Return what members of each group pass on, summed by round and target; a ring has one source for each target."""
        found = []
        for q, group in enumerate(self.groups):
            ring, (_, came) = self.engines[group], self._brought(q)
            number, member, receiver = np.nonzero(came)
            ends = (ring[member - 1, receiver], ring[member, receiver])
            found.append((number, *ends, came[number, member, receiver]))
        return Traffic(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _brought(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes that a group's ranks receive in each round: from train ranks, and from the member before.

        Both are [rounds, members, ranks of an engine] int64. The k-th member after a head receives in round r + k what the head
        receives in round r, so the cost depends on the number of chunks but not on the number of hops.
        """
        members, size = len(self.groups[q]), self.engines.shape[1]
        place = (self.round[:, q].astype(np.int64) * members + self.head[:, q]) * size + self.chunks.receiver
        first = np.bincount(place, self.chunks.bytes, self.rounds * members * size).astype(np.int64)
        first = first.reshape(self.rounds, members, size)
        passed = np.zeros_like(first)
        for hop in range(1, members):
            passed[hop:] += np.roll(first, hop, 1)[:-hop]
        return first, passed

    # ---- one rank -------------------------------------------------------------------------------------------------------

    def rank(self, rank: int) -> RankPlan:
        """Return one rank's part. Raises KeyError if the rank neither trains nor generates."""
        if rank in self.held.rows:
            none = np.zeros(0, np.int32)
            return RankPlan(self.rounds, self._sends(rank), self._items(none, none, none)[0], none, none)
        engine, g = self.place[rank]
        q, p = self.ring[engine]
        ring = self.engines[self.groups[q], g]
        chunk = np.flatnonzero(self.chunks.receiver == g)
        hop = (p - self.head[chunk, q]) % len(ring)
        arrival = self.arrival[chunk, engine]
        receives, got, _ = self._items(chunk, arrival, np.where(hop == 0, self.source[chunk, q], ring[p - 1]))
        receives.row[:] = self.needed.row[self.chunks.row[got]]
        receives.key[:] = self.pieces.needed[self.chunks.piece[got]]
        on = hop < len(ring) - 1
        after = ring[(p + 1) % len(ring)]
        sends, passed, _ = self._items(chunk[on], arrival[on] + 1, np.full(np.count_nonzero(on), after))
        order = np.argsort(got)
        sends.source[:] = order[np.searchsorted(got, passed, sorter=order)]
        return RankPlan(self.rounds, sends, receives, *self._units(engine, g))

    def _sends(self, rank: int) -> TransferItems:
        """Return the items that a train rank sends."""
        order, source = self._by_source
        chunk, q = np.divmod(order[slice(*np.searchsorted(source, (rank, rank + 1)))], len(self.groups))
        items, piece, flow = self._items(chunk, self.round[chunk, q], self._heads[chunk, q])
        box = self.chunks.piece[piece]
        rows = self.held.rows[rank]
        order = np.argsort(rows.box, kind="stable")
        items.row[:] = rows.row[order[np.searchsorted(rows.box, self.pieces.held[box], sorter=order)]]
        # Hash each box only on its way to the first rank that needs it, in one group, which changes from chunk to chunk.
        hashed = (chunk % len(self.groups) == q)[flow] & self._first_needing[self.chunks.row[piece]]
        items.key[:] = np.where(hashed, self.pieces.needed[box], -1)
        return items

    def _items(self, chunk: np.ndarray, number: np.ndarray, peer: np.ndarray) -> tuple[TransferItems, np.ndarray, np.ndarray]:
        """Return (the pieces of these chunks as items; the piece of each item; the flow of each item).

        number, peer: round and other end of each chunk.
        """
        order = intersection.lexicographic([number, peer, chunk])
        place, piece = intersection.expand(self.chunks.first[chunk[order]], self.chunks.count[chunk[order]])
        flow = order[place]
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
        """Return (finish_round, order) of a rank's own units."""
        own = self.needed.own[g]
        finish = self.finish[own, engine]
        return finish, np.lexsort((own, finish)).astype(np.int32)

    @cached_property
    def _by_source(self) -> tuple[np.ndarray, np.ndarray]:
        """(flows by source, their sources), [chunks * groups] each."""
        source = self.source.ravel()
        order = np.argsort(source, kind="stable")
        return order, source[order]

    @cached_property
    def _heads(self) -> np.ndarray:
        """Rank that receives the chunk from its source, [chunks, groups] int32."""
        first = (self.engines[group][self.head[:, q], self.chunks.receiver] for q, group in enumerate(self.groups))
        return np.stack(list(first), 1)

    @cached_property
    def _first_needing(self) -> np.ndarray:
        """[rows] bool: True if a row of `needed` is the first that needs its box."""
        found = np.zeros(len(self.needed.box), bool)
        found[np.unique(self.needed.box, return_index=True)[1]] = True
        return found

    # ---- all ranks ------------------------------------------------------------------------------------------------------

    def plan(self) -> RefitPlan:
        """Return every rank's part, with the digest keys."""
        ranks = [*self.held.rows, *self.place]
        return RefitPlan(
            {rank: self.rank(rank) for rank in ranks},
            keys=len(self.needed.boxes),
            key_tensor=self.needed.boxes.tensor,
            chunk_bytes=int((self.pieces.numel * self.width[self.needed.boxes.tensor[self.pieces.needed]]).max(initial=0)),
            bucket_bytes=self.bucket_bytes,
        )

    def traffic(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (bytes out, bytes in) of each global rank in each round, [rounds, ranks] int64 each."""
        ranks, sent = 1 + max([*self.held.rows, *self.place]), self.sent()
        out = np.bincount(sent.round * ranks + sent.source, sent.bytes, self.rounds * ranks).astype(np.int64)
        out = out.reshape(self.rounds, ranks)
        into = np.zeros_like(out)
        for q, group in enumerate(self.groups):
            ring, (first, passed) = self.engines[group], self._brought(q)
            into[:, ring] = first + passed
            out[:, np.roll(ring, 1, 0)] = passed
        return out, into
