"""Boxes: rectangular parts of tensors, in ranks' memory, in files and in messages.

A box is an offset and a size in every dimension of a whole tensor. A piece maps a box of one tensor to a box of another, so a
fused QKV, an interleaved QKV, `gate_up` and stacked experts are lists of pieces. A region maps a box to a local tensor's
storage, with any strides.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: an offset and a size for each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(min(o + s, p + t) for o, s, p, t in zip(self.offset, self.size, other.offset, other.size, strict=True))
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds `outer`."""
        return tuple(slice(o - p, o - p + s) for o, s, p in zip(self.offset, self.size, outer.offset, strict=True))


def chunk(box: Box, dim: int, parts: int, part: int) -> Box:
    """Return part number `part` of a box cut as torch.chunk cuts: equal parts, the last ones shorter or empty."""
    step = -(-box.size[dim] // parts)
    start = min(part * step, box.size[dim])
    offset, size = list(box.offset), list(box.size)
    offset[dim] += start
    size[dim] = min(step, size[dim] - start)
    return Box(tuple(offset), tuple(size))


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of all entries."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """Box `source` of tensor `name` holds the entries of box `target` of another tensor, in the same order.

    Worked example, expert 3 of a stacked [8, 64, 32] whose checkpoint has one [64, 32] per expert:
        Piece("mlp.experts.3.up_proj.weight", source=Box((0, 0), (64, 32)), target=Box((3, 0, 0), (1, 64, 32)))
    The sizes are equal except for dimensions of size 1.
    """

    name: str
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Region:
    """The location of a box of a tensor on disk within a tensor of this rank. Entries may be in any order.

    Entry `index` of the box is at `offset + sum(index * strides)` entries from the start of the local tensor.
    Worked example, rows 8 to 11 of a [16, 32] in the second half of the columns of a local [4, 64]:
        Region("mlp.up_proj.weight", Box((8, 0), (4, 32)), "gate_up", offset=32, strides=(64, 1))
    """

    name: str  # the tensor on disk
    box: Box  # of the tensor on disk
    tensor: str  # this rank's name of the local tensor
    offset: int  # entries
    strides: tuple[int, ...]  # entries, one for each dimension of the box; 0 where its size is 1


def region(piece: Piece, tensor: str, strides: tuple[int, ...]) -> Region:
    """Convert a piece to a region of the local tensor `tensor`, which has these strides."""
    offset = sum(map(operator.mul, piece.target.offset, strides))
    steps = iter(step for step, size in zip(strides, piece.target.size, strict=True) if size > 1)
    along = tuple(next(steps) if size > 1 else 0 for size in piece.source.size)
    return Region(piece.name, piece.source, tensor, offset, along)
