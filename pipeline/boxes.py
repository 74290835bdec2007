"""Boxes: the parts of a tensor that ranks hold, files store and messages carry.

A box is an offset and a size in every dimension of a whole tensor. A piece says that a box of one tensor is a box of another:
a fused QKV, an interleaved QKV, `gate_up` and stacked experts are only lists of pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """What both cover; None if that is nothing."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(min(o + s, p + t) for o, s, p, t in zip(self.offset, self.size, other.offset, other.size, strict=True))
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`."""
        return tuple(slice(o - p, o - p + s) for o, s, p in zip(self.offset, self.size, outer.offset, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Piece:
    """The entries of box `source` of the tensor `name` are, in the same order, those of box `target` of another tensor.

    Worked example, expert 3 of a stacked [8, 64, 32] whose checkpoint has one [64, 32] per expert:
        Piece("mlp.experts.3.up_proj.weight", source=Box((0, 0), (64, 32)), target=Box((3, 0, 0), (1, 64, 32)))
    The sizes are equal but for dimensions of size 1.
    """

    name: str
    source: Box
    target: Box
