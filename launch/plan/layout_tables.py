"""Build the tables of boxes of `refit_layouts` from tensors' names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.boxes import Box
from pipeline.models.tensors import Tensor
from pipeline.refit.tables import LayoutTable, columns

Shape = tuple[int, ...]
Held = Iterable[tuple[str, Box]]
"""Pairs of (tensor on disk, box of it)."""


class TableBuilder:
    """Builds the arrays of a LayoutTable from (tensor name, box) pairs."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._number = {name: i for i, name in enumerate(self.shapes)}
        self._dims = max(map(len, self.shapes.values()))

    def columns(self, boxes_held: Held) -> list[np.ndarray]:
        """Return the columns tensor, offset and size."""
        return columns(list(boxes_held), self._number, self._dims)

    def table(self, entries: Iterable[tuple[str, str, Box]]) -> LayoutTable:
        """Return the table of a generate rank from (unit, tensor, box)."""
        entries = list(entries)
        units = {unit: i for i, unit in enumerate(dict.fromkeys(unit for unit, _, _ in entries))}
        unit = np.array([units[unit] for unit, _, _ in entries], np.int32)
        tensor, offset, size = self.columns((name, box) for _, name, box in entries)
        return LayoutTable(tensor, offset, size, unit, list(units))


def join_tables(*parts: list[np.ndarray]) -> LayoutTable:
    """Return the table of a train rank."""
    tensor, offset, size = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return LayoutTable(tensor, offset, size, np.full(len(tensor), -1, np.int32))


def consecutive(counts: list[int]) -> list[range]:
    """Return consecutive ranges with these numbers of entries, from 0."""
    stops = np.cumsum(counts).tolist()
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def stages_of(layer: int | None, embedding: bool, stages: list[range], tied: bool) -> list[int]:
    """Return the stages that hold the tensors of a layer, of the embedding, or of the head.

    A tied embedding is the last stage's output layer as well.
    """
    last = len(stages) - 1
    if layer is not None:
        return [i for i, layers in enumerate(stages) if layer in layers]
    if embedding:
        return sorted({0, last}) if tied else [0]
    return [last]
