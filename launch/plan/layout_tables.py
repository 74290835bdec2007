"""Build the LayoutTables of `refit_layouts` from names of tensors and boxes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.boxes import Box
from pipeline.models.tensors import Tensor
from pipeline.refit.tables import LayoutTable, columns

Shape = tuple[int, ...]
Held = Iterable[tuple[str, Box]]
"""Pairs of (name of a tensor on disk, a box of this tensor)."""


class TableBuilder:
    """Builds LayoutTables from (unit, tensor name, box), or only their columns from (tensor name, box)."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._number = {name: i for i, name in enumerate(self.shapes)}
        self._dims = max(map(len, self.shapes.values()))

    def columns(self, boxes_held: Held) -> list[np.ndarray]:
        """Return the columns [tensor number, offset, size] of a LayoutTable with these boxes."""
        return columns(list(boxes_held), self._number, self._dims)

    def table(self, entries: Iterable[tuple[str, str, Box]]) -> LayoutTable:
        """Return the table of a generate rank with these entries: (unit, tensor's name, box)."""
        entries = list(entries)
        units = {unit: i for i, unit in enumerate(dict.fromkeys(unit for unit, _, _ in entries))}
        unit = np.array([units[unit] for unit, _, _ in entries], np.int32)
        tensor, offset, size = self.columns((name, box) for _, name, box in entries)
        return LayoutTable(tensor, offset, size, unit, list(units))


def join_tables(*parts: list[np.ndarray]) -> LayoutTable:
    """Return the table of a train rank. parts: groups of columns as `TableBuilder.columns` returns them."""
    tensor, offset, size = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return LayoutTable(tensor, offset, size, np.full(len(tensor), -1, np.int32))


def consecutive(counts: list[int]) -> list[range]:
    """Return consecutive ranges that start at 0 and have these lengths."""
    stops = np.cumsum(counts).tolist()
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def stages_of(layer: int | None, embedding: bool, stages: list[range], tied: bool) -> list[int]:
    """Return the numbers of the pipeline stages that hold a tensor.

    layer: the tensor's layer; None for the embedding, the last norm and the head. embedding: whether it is the embedding.
    stages: the layers of each stage. tied: whether the embedding is also the output layer, and therefore on the last stage too.
    """
    last = len(stages) - 1
    if layer is not None:
        return [i for i, layers in enumerate(stages) if layer in layers]
    if embedding:
        return sorted({0, last}) if tied else [0]
    return [last]
