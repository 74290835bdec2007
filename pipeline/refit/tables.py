"""What ranks tell of their layouts, what the planner makes of them, and what each rank is given to do: columns, not objects.

A model on thousands of ranks has millions of regions, so everything between `layout` and `transfer` is numpy arrays with one
row per region or per item. All of it travels as msgpack (`pipeline/rpc`).

Left out: torch. The planner runs where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pipeline.boxes import Box, Region


class LayoutTable(msgspec.Struct):
    """The regions that one rank holds (train) or wants (generate), a row each. D: the most dimensions of any tensor."""

    tensor: np.ndarray  # [n] int32: which tensor, in the order of the model's names on disk
    offset: np.ndarray  # [n, D] int64: of the box in it; 0 beyond its dimensions
    size: np.ndarray  # [n, D] int64; 1 beyond its dimensions
    unit: np.ndarray  # [n] int32: generate: which of `units`; train: -1
    units: list[str] = []  # generate: what is brought up to date together, in the model's order

    def __len__(self) -> int:
        return len(self.tensor)


def layout_table(
    regions: Sequence[Region], shapes: Mapping[str, tuple[int, ...]], units: Sequence[str] | None = None
) -> LayoutTable:
    """A row for each region. shapes: of all tensors on disk, in their order. units: the name of each region's unit."""
    number = {name: i for i, name in enumerate(shapes)}
    dims = max((len(shape) for shape in shapes.values()), default=1) or 1
    tensor, offset, size = columns([(held.name, held.box) for held in regions], number, dims)
    if units is None:
        return LayoutTable(tensor, offset, size, np.full(len(regions), -1, np.int32))
    names = list(dict.fromkeys(units))
    place = {name: i for i, name in enumerate(names)}
    return LayoutTable(tensor, offset, size, np.array([place[name] for name in units], np.int32), names)


def columns(held: Sequence[tuple[str, Box]], number: Mapping[str, int], dims: int) -> list[np.ndarray]:
    """Tensor, offset and size of a `LayoutTable`, from (tensor on disk, box of it). number: of each tensor; dims: D."""
    offset, size = np.zeros((len(held), dims), np.int64), np.ones((len(held), dims), np.int64)
    for i, (_, box) in enumerate(held):
        offset[i, : len(box.offset)], size[i, : len(box.size)] = box.offset, box.size
    return [np.array([number[name] for name, _ in held], np.int32), offset, size]


class TransferItems(msgspec.Struct):
    """Boxes on their way, a row each, in the order of rounds. Of one round and peer, in the order they have in the message."""

    round: np.ndarray  # [n] int32
    peer: np.ndarray  # [n] int32: global rank of the other end
    row: np.ndarray  # [n] int32: the region of this rank's table that the box is part of; -1 for a relay (see `source`)
    offset: np.ndarray  # [n, D] int64: of the box in the tensor on disk
    size: np.ndarray  # [n, D] int64
    key: np.ndarray  # [n] int32: what the digest adds these entries up under; -1 for a send that does not speak for them
    source: np.ndarray  # [n] int32: of a send by a generate rank, the receive (of an earlier round) that it passes on; else -1

    def __len__(self) -> int:
        return len(self.round)


class RankPlan(msgspec.Struct):
    """What one rank does in a refit."""

    rounds: int  # of the whole plan: the same on every rank
    sends: TransferItems
    receives: TransferItems
    finish_round: np.ndarray  # [u] int32: of each unit of this rank's table, the round after whose receives all ranks finish it
    order: np.ndarray  # [u] int32: units in the order in which they are finished, the same on all ranks of an engine


class RefitPlan(msgspec.Struct):
    """The whole transfer."""

    ranks: dict[int, RankPlan]  # by global rank; train and generate
    keys: int  # how many digest keys there are
    key_tensor: np.ndarray  # [keys] int32: the tensor on disk of each
    chunk_bytes: int  # of the largest item
    bucket_bytes: int  # what a rank at most sends in a round, and at most receives
