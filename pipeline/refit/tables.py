"""The layouts of ranks, the plan, and each rank's part of it, as columns.

A model on thousands of ranks has millions of regions, so everything between `layout` and `transfer` is numpy arrays with one
row per region or item. All of it is sent as msgpack (`pipeline/rpc`). The planner runs without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pipeline.boxes import Box, Region


class LayoutTable(msgspec.Struct):
    """The regions that one rank holds (train) or needs (generate), a row each. D: the most dimensions of any tensor."""

    tensor: np.ndarray  # [n] int32: index into the model's tensors on disk
    offset: np.ndarray  # [n, D] int64: the box's offset in the tensor; 0 beyond its dimensions
    size: np.ndarray  # [n, D] int64; 1 beyond its dimensions
    unit: np.ndarray  # [n] int32: generate: index into `units`; train: -1
    units: list[str] = []  # generate: names of the update units, in the model's order

    def __len__(self) -> int:
        return len(self.tensor)


def layout_table(
    regions: Sequence[Region], shapes: Mapping[str, tuple[int, ...]], units: Sequence[str] | None = None
) -> LayoutTable:
    """Return a table with a row for each region.

    shapes: tensor -> its shape, for all tensors on disk in their order. units: the name of each region's unit.
    """
    number = {name: i for i, name in enumerate(shapes)}
    dims = max((len(shape) for shape in shapes.values()), default=1) or 1
    tensor, offset, size = columns([(region.name, region.box) for region in regions], number, dims)
    if units is None:
        return LayoutTable(tensor, offset, size, np.full(len(regions), -1, np.int32))
    names = list(dict.fromkeys(units))
    unit_number = {name: i for i, name in enumerate(names)}
    return LayoutTable(tensor, offset, size, np.array([unit_number[name] for name in units], np.int32), names)


def columns(boxes: Sequence[tuple[str, Box]], number: Mapping[str, int], dims: int) -> list[np.ndarray]:
    """Return the columns tensor, offset and size of a `LayoutTable`.

    boxes: pairs (name of a tensor on disk, box of it). number: tensor name -> its index. dims: D of the `LayoutTable`.
    """
    offset, size = np.zeros((len(boxes), dims), np.int64), np.ones((len(boxes), dims), np.int64)
    for i, (_, box) in enumerate(boxes):
        offset[i, : len(box.offset)], size[i, : len(box.size)] = box.offset, box.size
    return [np.array([number[name] for name, _ in boxes], np.int32), offset, size]


class TransferItems(msgspec.Struct):
    """Boxes to transfer, a row each, in the order of rounds; boxes of one round and peer are in the order of their message."""

    round: np.ndarray  # [n] int32
    peer: np.ndarray  # [n] int32: global rank of the other end
    row: np.ndarray  # [n] int32: row of this rank's table that contains the box; -1 for a relay (see `source`)
    offset: np.ndarray  # [n, D] int64: the box's offset in the tensor on disk
    size: np.ndarray  # [n, D] int64
    key: np.ndarray  # [n] int32: digest key of the box; -1 for a send that is not hashed
    source: np.ndarray  # [n] int32: for a relay, the receive of the round before that it passes on; otherwise -1

    def __len__(self) -> int:
        return len(self.round)


class RankPlan(msgspec.Struct):
    """One rank's part in a refit."""

    rounds: int  # of the whole plan; equal on every rank
    sends: TransferItems
    receives: TransferItems
    finish_round: np.ndarray  # [u] int32: round after whose receives all ranks of the engine finish the unit
    order: np.ndarray  # [u] int32: units in the order of finishing, equal on all ranks of an engine


class RefitPlan(msgspec.Struct):
    """The whole transfer."""

    ranks: dict[int, RankPlan]  # by global rank; train and generate
    keys: int  # number of digest keys
    key_tensor: np.ndarray  # [keys] int32: the tensor on disk of each
    chunk_bytes: int  # of the largest item
    bucket_bytes: int  # the most that a rank sends in a round, and the most that it receives
