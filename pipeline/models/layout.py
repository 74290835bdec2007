"""Which box of which source lies where in what a function makes of its sources.

    record(torch.cat, ...) -> the result's shape and its Pieces

The function runs once, on meta tensors, under a TorchDispatchMode. Views need no rule of their own: torch says where in its
storage a view lies. What makes new storage (cat, stack, clone, a change of dtype, padding, copies into zeros) is followed by
composing pieces. Entries that the function fills with zeros (vocabulary padding) have no piece.

Not expressible, so refused with a ValueError: arithmetic, indexing with tensors, entries that are used twice (expand), and
transposed pieces; `Piece` keeps the order of entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.boxes import Box, Piece, whole
from pipeline.models.base import Split

aten = torch.ops.aten
Shape = tuple[int, ...]

ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
COPIES = {aten.clone.default, aten._to_copy.default}


def record(
    function: Callable[..., torch.Tensor], shapes: Mapping[str, Shape] | Sequence[tuple[str, Shape]]
) -> tuple[Shape, list[Piece]]:
    """What `function(*tensors)` makes of tensors with these names and shapes, in that order: its shape and its pieces.

    The pieces cover every entry of the result once, but for entries that are filled with zeros. One recording serves all
    calls of the same function (a functools.partial: of equal arguments) and the same shapes. Raises ValueError on what no
    pieces express.
    """
    pairs = list(shapes.items() if isinstance(shapes, Mapping) else shapes)
    names = [name for name, _ in pairs]
    shape, pieces = _recorded(_Call(function), tuple(tuple(shape) for _, shape in pairs))
    return shape, [Piece(names[int(piece.name)], piece.source, piece.target) for piece in pieces]


def record_all(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], sources: Mapping[str, Shape]
) -> dict[str, tuple[Shape, list[Piece]]]:
    """As `record`, for a function of a dict of tensors that returns one: {result's name: (its shape, its pieces)}."""
    with torch.device("meta"), torch.no_grad():
        tensors = {name: torch.empty(shape) for name, shape in sources.items()}
        with _Recorder(tensors) as recorder:
            results = dict(function(dict(tensors)))
        return {name: (tuple(tensor.shape), recorder.pieces(tensor)) for name, tensor in results.items()}


class _Call:
    """A function that equals another of the same effect: partials are compared by what they hold."""

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
def _recorded(call: _Call, shapes: tuple[Shape, ...]) -> tuple[Shape, tuple[Piece, ...]]:
    """Pieces whose names are the sources' positions."""
    sources = {str(i): shape for i, shape in enumerate(shapes)}
    shape, pieces = record_all(lambda tensors: {"": call.function(*tensors.values())}, sources)[""]
    return shape, tuple(pieces)


class _Recorder(TorchDispatchMode):
    """Knows, for each storage, the shape it was made with and the pieces that it holds."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.homes: dict[int, tuple[Shape, list[Piece]]] = {}
        self.keep: list[torch.Tensor] = []  # else a freed storage's key would come again
        for name, tensor in sources.items():
            box = whole(tuple(tensor.shape))
            self.enter(tensor, [Piece(name, box, box)] if box.numel else [])

    def enter(self, tensor: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
        """Know a tensor with new storage. What is not contiguous gets a contiguous stand-in: same values, same shape."""
        tensor = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.homes[_storage(tensor)] = (tuple(tensor.shape), pieces)
        self.keep.append(tensor)
        return tensor

    def known(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_meta and _storage(value) in self.homes

    def pieces(self, tensor: torch.Tensor) -> list[Piece]:
        """What a known tensor holds, with targets in its own shape."""
        if not self.known(tensor):
            raise ValueError("recorded function: its result, or a part of it, comes from none of its sources")
        shape, held = self.homes[_storage(tensor)]
        found = []
        for view in _view(tensor, shape):
            found += [Piece(p.name, p.source, _follow(view.source, view.target, p.target)) for p in _inside(held, view.source)]
        return found

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`, into entries that held zeros."""
        if not self.known(target) or target.shape != source.shape:
            raise ValueError("recorded function: copy_ needs a target made of zeros, of its source's shape")
        shape, held = self.homes[_storage(target)]
        new = self.pieces(source)
        for view in _view(target, shape):
            if any(piece.target.intersect(view.source) for piece in held):
                raise ValueError("recorded function: copy_ overwrites what was copied before")
            held += [Piece(p.name, p.source, _follow(view.target, view.source, p.target)) for p in _inside(new, view.target)]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is aten.copy_.default:
            self.write(args[0], args[1])
            return args[0]
        result = op(*args, **(kwargs or {}))
        if op in ZEROS:
            return self.enter(result, [])
        inputs = [value for value in tree_leaves((args, kwargs)) if self.known(value)]
        if not inputs:
            return result
        if op in COPIES:
            return self.enter(result, self.pieces(args[0]))
        if op in (aten.cat.default, aten.stack.default):
            return self.enter(result, self.joined(op, *args, **(kwargs or {})))
        if op is aten.constant_pad_nd.default:
            return self.enter(result, self.padded(*args))
        storages = {_storage(value) for value in inputs}
        views = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        if op is aten.view.dtype or op._schema.is_mutable or any(_storage(view) not in storages for view in views):
            raise ValueError(f"recorded function: {op} does more than move entries, so no pieces express it")
        return result

    def joined(self, op, tensors: Sequence[torch.Tensor], dim: int = 0) -> list[Piece]:
        stack = op is aten.stack.default
        dim = dim % (tensors[0].dim() + stack)
        found, at = [], 0
        for tensor in tensors:
            for p in self.pieces(tensor):
                offset, size = list(p.target.offset), list(p.target.size)
                if stack:
                    offset.insert(dim, at)
                    size.insert(dim, 1)
                else:
                    offset[dim] += at
                found.append(Piece(p.name, p.source, Box(tuple(offset), tuple(size))))
            at += 1 if stack else tensor.shape[dim]
        return found

    def padded(self, tensor: torch.Tensor, amounts: Sequence[int], value: float = 0) -> list[Piece]:
        """torch lists amounts from the last dimension on: before, after."""
        if value != 0 or any(amount < 0 for amount in amounts):
            raise ValueError("recorded function: pad can only add zeros")
        before = [0] * (tensor.dim() - len(amounts) // 2) + list(amounts[::2])[::-1]
        return [
            Piece(p.name, p.source, Box(tuple(o + b for o, b in zip(p.target.offset, before, strict=True)), p.target.size))
            for p in self.pieces(tensor)
        ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # views of a meta tensor share its storage


def _inside(pieces: Iterable[Piece], box: Box) -> list[Piece]:
    """The parts of `pieces` whose targets lie within `box`; their offsets stay as they are."""
    found = []
    for piece in pieces:
        both = piece.target.intersect(box)
        if both == piece.target:
            found.append(piece)
        elif both is not None:
            found.append(Piece(piece.name, _follow(piece.target, piece.source, both), both))
    return found


def _follow(box: Box, image: Box, part: Box) -> Box:
    """The part of `image` that corresponds to `part` of `box`; their sizes are equal but for dimensions of size 1."""
    if box.size == image.size:
        return Box(tuple(i + p - b for i, p, b in zip(image.offset, part.offset, box.offset, strict=True)), part.size)
    parts = iter((p - b, n) for p, b, n, m in zip(part.offset, box.offset, part.size, box.size, strict=True) if m > 1)
    moved = [next(parts) if size > 1 else (0, 1) for size in image.size]
    return Box(tuple(i + m for i, (m, _) in zip(image.offset, moved, strict=True)), tuple(n for _, n in moved))


# ---- strided views as boxes: a run is (count, stride in the storage, stride in the contiguous view)
Run = tuple[int, int, int]


def _view(tensor: torch.Tensor, home: Shape) -> list[Piece]:
    """Where a view's entries lie in its storage, which holds a contiguous tensor of shape `home`: pieces from the storage (as
    `source`) to the view (as `target`)."""
    shape = tuple(tensor.shape)
    if shape == home and tensor.is_contiguous():
        box = whole(shape)
        return [Piece("", box, box)] if box.numel else []
    runs: list[Run] = []
    for count, stride, place in zip(shape, tensor.stride(), contiguous_strides(shape), strict=True):
        if count == 0:
            return []
        if count == 1:
            continue
        if stride == 0:
            raise ValueError("recorded function: expand uses entries more than once, so no pieces express it")
        if runs and runs[-1][1] == count * stride and runs[-1][2] == count * place:  # one longer run
            runs[-1] = (runs[-1][0] * count, stride, place)
        else:
            runs.append((count, stride, place))
    return _peel(runs, tensor.storage_offset(), 0, home, shape)


def _peel(runs: list[Run], start: int, place: int, home: Shape, shape: Shape) -> list[Piece]:
    """The boxes of runs that begin at `start` in a storage of shape `home` and at `place` in a view of shape `shape`."""
    pieces = []
    for part, starts in peel(runs, (start, place), (home, shape)):
        if [run[1] for run in part] != sorted((run[1] for run in part), reverse=True):
            raise ValueError("recorded function: it transposes, which no pieces express")
        pieces.append(Piece("", run_box(part, 0, starts, home)[0], run_box(part, 1, starts, shape)[0]))
    return pieces


def peel(
    runs: list[Run], starts: tuple[int, int], shapes: tuple[Shape, Shape | None]
) -> Iterator[tuple[list[Run], tuple[int, int]]]:
    """Parts of what `runs` go over, each as its runs and where it begins at either end. The ends are contiguous tensors of
    these shapes; None: any storage. Runs are split until each lies along one dimension of either, one run to a dimension."""

    def go_on(skip: Run, rest: list[Run]) -> Iterator[tuple[list[Run], tuple[int, int]]]:
        count, stride, far = skip
        return peel(rest, (starts[0] + count * stride, starts[1] + count * far), shapes)

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
    """What `peel` gave, at one end (0 or 1): the box of that tensor, and the dimension along which each run goes."""
    dims = [_dimension(run[end + 1], shape)[0] for run in runs]
    size = [1] * len(shape)
    for run, dim in zip(runs, dims, strict=True):
        size[dim] = run[0]
    return Box(_coordinates(starts[end], shape), tuple(size)), dims


def _rows(run: Run, row: int, head: int) -> list[tuple[int, list[Run]]]:
    """Parts of a run that goes on in the next row of `row` entries: the `head` left of its first row, whole rows, a tail; each
    with how many entries come before it, as its own runs."""
    count, stride, far = run
    rows, tail = divmod(count - head, row)
    parts = [
        (0, [(head, stride, far)]),
        (head, [(rows, stride * row, far * row), (row, stride, far)]),
        (count - tail, [(tail, stride, far)]),
    ]
    # A run of one entry is none: it needs no dimension of its own.
    return [(skip, [part for part in new if part[0] > 1]) for skip, new in parts if new[0][0]]


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Those of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _coordinates(flat: int, shape: Shape) -> Shape:
    return tuple(flat // stride % size for stride, size in zip(contiguous_strides(shape), shape, strict=True))


def _dimension(stride: int, shape: Shape) -> tuple[int, int]:
    """The dimension along which a flat stride goes, and by how many entries of it."""
    for dim, unit in enumerate(contiguous_strides(shape)):
        if shape[dim] > 1 and stride % unit == 0:
            return dim, stride // unit
    raise ValueError(f"a stride of {stride} in a tensor of shape {list(shape)}")


# ---- working with pieces
def cut(tensor: torch.Tensor, split: Split, rank: int, size: int) -> torch.Tensor:
    """The part of a whole parameter that rank `rank` of `size` tensor-parallel ranks holds. Can be recorded.

    Raises ValueError if it does not divide.
    """
    if split == "none" or size == 1:
        return tensor
    if split == "halves":
        return torch.cat([cut(half, "rows", rank, size) for half in _parts(tensor, 0, 2, split)])
    return _parts(tensor, 0 if split == "rows" else 1, size, split)[rank]


def _parts(tensor: torch.Tensor, dim: int, count: int, split: Split) -> tuple[torch.Tensor, ...]:
    if dim >= tensor.dim() or tensor.shape[dim] % count:
        raise ValueError(f"a parameter of shape {list(tensor.shape)} cannot be cut by {split}: {count} equal parts")
    return tensor.split(tensor.shape[dim] // count, dim)


def cut_of(function: Callable[..., torch.Tensor], split: Split, rank: int, size: int) -> Callable[..., torch.Tensor]:
    """`cut` after `function`, as a function that `record` recognises when it is made again."""
    return functools.partial(_cut_result, function, split, rank, size)


def _cut_result(function: Callable[..., torch.Tensor], split: Split, rank: int, size: int, *sources: torch.Tensor):
    return cut(function(*sources), split, rank, size)


def restrict(pieces: Iterable[Piece], box: Box) -> list[Piece]:
    """The parts of `pieces` whose targets lie within `box`, as pieces of a tensor that holds only that box."""
    return [
        Piece(p.name, p.source, Box(tuple(o - b for o, b in zip(p.target.offset, box.offset, strict=True)), p.target.size))
        for p in _inside(pieces, box)
    ]


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Entries `start` to `stop` of a contiguous tensor, counted flat, as at most 2*len(shape) - 1 boxes in their order.

    Worked example, entries 3 to 14 of a [4, 5]: the end of row 0, row 1, the start of row 2.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"entries {start} to {stop} of a tensor of shape {list(shape)}")
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
    rest = (0,) * (len(shape) - 1)
    middle = [Box((first, *rest), (last - first, *shape[1:]))] if last > first else []
    return head + middle + tail


@torch.no_grad()
def place(target: torch.Tensor, pieces: Iterable[Piece], read: Callable[[str, Box], torch.Tensor]) -> None:
    """Copy `read(name, box of the source)` into `target`, whatever the dtypes; entries without a piece stay as they are."""
    outer = whole(tuple(target.shape))
    for piece in pieces:
        target[piece.target.within(outer)].copy_(read(piece.name, piece.source).reshape(piece.target.size))


def invert(layout: Mapping[str, Iterable[Piece]]) -> dict[str, list[Piece]]:
    """{target: pieces of sources} -> {source: pieces of targets}."""
    inverse: dict[str, list[Piece]] = {}
    for name, pieces in layout.items():
        for piece in pieces:
            inverse.setdefault(piece.name, []).append(Piece(name, piece.target, piece.source))
    return inverse
