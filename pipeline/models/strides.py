"""Describe a strided copy between two tensors as pairs of boxes: a box of one tensor is copied to a box of the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from pipeline.boxes import Box

Shape = tuple[int, ...]
Run = tuple[int, int, int]
"""(count, stride in one tensor, stride in the other) of the entries that a copy moves."""


def split_runs(
    runs: list[Run], starts: tuple[int, int], shapes: tuple[Shape, Shape | None]
) -> Iterator[tuple[list[Run], tuple[int, int]]]:
    """Split a strided copy into parts that are boxes in both tensors. Yield (runs, start offsets in both tensors) of each part.

    shapes: the shapes of the two contiguous tensors; None for a storage without a shape, which restricts nothing. Runs are
    split until each lies along one dimension of each tensor, and each dimension has at most one run.
    """

    def go_on(skip: Run, rest: list[Run]) -> Iterator[tuple[list[Run], tuple[int, int]]]:
        count, stride, far = skip
        return split_runs(rest, (starts[0] + count * stride, starts[1] + count * far), shapes)

    ends = [(end + 1, starts[end], dims) for end, dims in enumerate(shapes) if dims is not None]  # + 1: which stride of a run
    for i, run in enumerate(runs):
        before, after = runs[:i], runs[i + 1 :]
        for end, _, dims in ends:
            dim, step = _dimension(run[end], dims)
            if step != 1 or any(_dimension(other[end], dims)[0] == dim for other in after):  # entry by entry
                for n in range(run[0]):
                    yield from go_on((n, *run[1:]), before + after)
                return
    for i, run in enumerate(runs):
        before, after = runs[:i], runs[i + 1 :]
        for end, origin, dims in ends:
            dim, _ = _dimension(run[end], dims)
            row = dims[dim]
            room = row - _coordinates(origin, dims)[dim]
            if run[0] > room:
                for skip, new in _rows(run, row, room % row):
                    yield from go_on((skip, *run[1:]), before + new + after)
                return
    yield runs, starts


def run_box(runs: Sequence[Run], end: int, starts: tuple[int, int], shape: Shape) -> tuple[Box, list[int]]:
    """Return the box of a part from `split_runs` in one of the tensors, and the dimension along which each run lies.

    end: 0 for the first tensor, 1 for the second. shape: the shape of this tensor.
    """
    dims = [_dimension(run[end + 1], shape)[0] for run in runs]
    size = [1] * len(shape)
    for run, dim in zip(runs, dims, strict=True):
        size[dim] = run[0]
    return Box(_coordinates(starts[end], shape), tuple(size)), dims


def _rows(run: Run, row: int, head: int) -> list[tuple[int, list[Run]]]:
    """Split a run that extends over rows of `row` entries: its entries in the first row, in whole rows, and in the last row.

    head: the number of the run's entries in the first row. Return (number of the run's entries before the part, runs of the
    part) for each part that is not empty.
    """
    count, stride, far = run
    rows, tail = divmod(count - head, row)
    parts = [
        (0, [(head, stride, far)]),
        (head, [(rows, stride * row, far * row), (row, stride, far)]),
        (count - tail, [(tail, stride, far)]),
    ]
    # A run of one entry needs no dimension of its own.
    return [(skip, [part for part in new if part[0] > 1]) for skip, new in parts if new[0][0]]


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _coordinates(flat: int, shape: Shape) -> Shape:
    return tuple(flat // stride % size for stride, size in zip(contiguous_strides(shape), shape, strict=True))


def _dimension(stride: int, shape: Shape) -> tuple[int, int]:
    """Return (dimension along which a flat stride moves, step in entries of this dimension)."""
    for dim, unit in enumerate(contiguous_strides(shape)):
        if shape[dim] > 1 and stride % unit == 0:
            return dim, stride // unit
    raise ValueError(f"a stride of {stride} is along no dimension of a tensor of shape {list(shape)}")
