"""Record the layout of a function's result: which box of which source tensor lies where in it.

    record(torch.cat, ...) -> the result's shape and its Pieces

The function runs once, on meta tensors, under a `Recorder`. Entries that the function fills with zeros (vocabulary padding)
have no piece. Pieces keep the order of entries and use each entry once. So we raise ValueError for functions that compute new
values, index with tensors on the meta device, use entries twice (expand) or transpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from pipeline.boxes import Box, Piece, whole
from pipeline.models.family import Split
from pipeline.models.recorder import Recorder
from pipeline.models.strides import Shape


def record(
    function: Callable[..., torch.Tensor], shapes: Mapping[str, Shape] | Sequence[tuple[str, Shape]]
) -> tuple[Shape, list[Piece]]:
    """Return the shape and the pieces of the result of `function(*tensors)`.

    shapes: the names and shapes of the tensors, in the order of the arguments. The pieces cover every entry of the result once,
    except entries that the function fills with zeros. One recording serves all calls with the same shapes and an equal
    function; two functools.partial are equal if their arguments are. Raises ValueError if pieces cannot express the function.
    """
    pairs = list(shapes.items() if isinstance(shapes, Mapping) else shapes)
    names = [name for name, _ in pairs]
    shape, pieces = _record_call(_Call(function), tuple(tuple(shape) for _, shape in pairs))
    return shape, [Piece(names[int(piece.name)], piece.source, piece.target) for piece in pieces]


def record_all(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], sources: Mapping[str, Shape]
) -> dict[str, tuple[Shape, list[Piece]]]:
    """Return {name: (shape, pieces)} of the results of a function from a dict of tensors to a dict of tensors.

    sources: the names and shapes of the function's input. Raises ValueError as `record` does.
    """
    with torch.device("meta"), torch.no_grad():
        tensors = {name: torch.empty(shape) for name, shape in sources.items()}
        with Recorder(tensors) as recorder:
            results = dict(function(dict(tensors)))
        return {name: (tuple(tensor.shape), _pieces(recorder, tensor)) for name, tensor in results.items()}


def _pieces(recorder: Recorder, result: torch.Tensor) -> list[Piece]:
    """Return the pieces of a result, sorted by the offsets of their targets. Raises ValueError if pieces cannot express it."""
    content = recorder.read(result, torch.empty(result.shape))
    if content is None:
        computed = f": {', '.join(sorted(recorder.computed))} does more than move entries" if recorder.computed else ""
        raise ValueError(f"recorded function: its result does not consist of its sources alone{computed}")
    regions, background = content
    if background:
        raise ValueError(f"recorded function: it fills entries with {background:g}; expected zeros")
    pieces = []
    for region in regions:
        for source, target, axes in recorder.boxes(region, tuple(result.shape)):
            along = [axis for axis, size in zip(axes, source.size, strict=True) if size > 1]
            if along != sorted(along):
                raise ValueError("recorded function: it transposes, which pieces cannot express")
            pieces.append(Piece(region.name, source, target))
    if len({(piece.name, piece.source) for piece in pieces}) < len(pieces):
        raise ValueError("recorded function: it uses entries more than once (expand), which pieces cannot express")
    return sorted(pieces, key=lambda piece: piece.target.offset)


class _Call:
    """A function as a cache key. Two partials are equal if their functions and arguments are equal."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.key = _key(function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _key(value: object) -> Hashable:
    if isinstance(value, functools.partial):
        keywords = tuple((name, _key(v)) for name, v in sorted(value.keywords.items()))
        return functools.partial, _key(value.func), tuple(map(_key, value.args)), keywords
    return value


@functools.lru_cache(maxsize=4096)
def _record_call(call: _Call, shapes: tuple[Shape, ...]) -> tuple[Shape, tuple[Piece, ...]]:
    """Return the shape and pieces of a call. A piece's name is the position of its source."""
    sources = {str(i): shape for i, shape in enumerate(shapes)}
    shape, pieces = record_all(lambda tensors: {"": call.function(*tensors.values())}, sources)[""]
    return shape, tuple(pieces)


# ---- operations on pieces
def cut(tensor: torch.Tensor, split: Split, rank: int, size: int) -> torch.Tensor:
    """Return the part of a whole parameter that rank `rank` of `size` tensor-parallel ranks holds.

    `record` can record it. Raises ValueError if `size` does not divide the parameter.
    """
    if split == "none" or size == 1:
        return tensor
    if split == "halves":
        return torch.cat([cut(half, "rows", rank, size) for half in _parts(tensor, 0, 2, split)])
    if isinstance(split, tuple):
        return torch.cat([cut(part, "rows", rank, size) for part in tensor.split(split)])
    return _parts(tensor, 0 if split == "rows" else 1, size, split)[rank]


def _parts(tensor: torch.Tensor, dim: int, count: int, split: Split) -> tuple[torch.Tensor, ...]:
    if dim >= tensor.dim() or tensor.shape[dim] % count:
        raise ValueError(f"a parameter of shape {list(tensor.shape)} cannot be cut by {split}: {count} equal parts")
    return tensor.split(tensor.shape[dim] // count, dim)


def cut_after(function: Callable[..., torch.Tensor], split: Split, rank: int, size: int) -> Callable[..., torch.Tensor]:
    """Return a function that applies `function` and then `cut`. Two such functions of equal arguments share one recording."""
    return functools.partial(_cut_result, function, split, rank, size)


def _cut_result(function: Callable[..., torch.Tensor], split: Split, rank: int, size: int, *sources: torch.Tensor):
    return cut(function(*sources), split, rank, size)


def restrict(pieces: Iterable[Piece], box: Box) -> list[Piece]:
    """Return the parts of `pieces` whose targets lie in `box`, with offsets in a tensor that holds only this box."""
    return [
        Piece(p.name, p.source, Box(tuple(o - b for o, b in zip(p.target.offset, box.offset, strict=True)), p.target.size))
        for p in _inside(pieces, box)
    ]


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Return boxes that cover the flat range [start, stop) of a contiguous tensor, in order: at most 2 * len(shape) - 1.

    Example: the range [3, 14) of a tensor of shape [4, 5] is the end of row 0, row 1, and the start of row 2.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"entries {start} to {stop} are no range of a tensor of shape {list(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def inner(index: int, begin: int, end: int) -> list[Box]:
        boxes = flat_boxes(shape[1:], begin - index * row, end - index * row)
        return [Box((index, *box.offset), (1, *box.size)) for box in boxes]

    if first == last and stop - start < row:
        return inner(first, start, stop)
    head = inner(first, start, (first + 1) * row) if start % row else []
    tail = inner(last, last * row, stop) if stop % row else []
    first, last = first + bool(head), last + 1 - bool(tail)
    zeros = (0,) * (len(shape) - 1)
    middle = [Box((first, *zeros), (last - first, *shape[1:]))] if last > first else []
    return head + middle + tail


@torch.no_grad()
def copy_pieces(target: torch.Tensor, pieces: Iterable[Piece], read: Callable[[str, Box], torch.Tensor]) -> None:
    """Copy each piece into `target`, with a cast. Other entries keep their values.

    read: a function from (name of a source, box in it) to the tensor in this box.
    """
    outer = whole(tuple(target.shape))
    for piece in pieces:
        target[piece.target.within(outer)].copy_(read(piece.name, piece.source).reshape(piece.target.size))


def invert(layout: Mapping[str, Iterable[Piece]]) -> dict[str, list[Piece]]:
    """Turn {target: pieces of sources} into {source: pieces of targets}."""
    inverse: dict[str, list[Piece]] = {}
    for name, pieces in layout.items():
        for piece in pieces:
            inverse.setdefault(piece.name, []).append(Piece(name, piece.target, piece.source))
    return inverse


def _inside(pieces: Iterable[Piece], box: Box) -> list[Piece]:
    """Return the parts of `pieces` whose targets lie in `box`, with unchanged offsets."""
    parts = []
    for piece in pieces:
        overlap = piece.target.intersect(box)
        if overlap == piece.target:
            parts.append(piece)
        elif overlap is not None:
            parts.append(Piece(piece.name, _follow(piece.target, piece.source, overlap), overlap))
    return parts


def _follow(box: Box, image: Box, part: Box) -> Box:
    """Return the part of `image` that corresponds to `part` of `box`.

    The sizes of `image` and `box` are equal, except that either may have more dimensions of size 1.
    """
    if box.size == image.size:
        return Box(tuple(i + p - b for i, p, b in zip(image.offset, part.offset, box.offset, strict=True)), part.size)
    parts = iter((p - b, n) for p, b, n, m in zip(part.offset, box.offset, part.size, box.size, strict=True) if m > 1)
    moved = [next(parts) if size > 1 else (0, 1) for size in image.size]
    return Box(tuple(i + m for i, (m, _) in zip(image.offset, moved, strict=True)), tuple(n for _, n in moved))
