"""Record a function or a weight loader on meta tensors: which box of which source is copied where.

Views share their tensor's storage, so an offset and strides describe them, and need no rule of their own. What makes new
storage is followed: contiguous, a change of dtype, cat, stack, padding, rows by number, copies into empty or zero tensors.
Constants are kept as fills. Computed values are not expressed: they make the owner of the parameter that they are written to
opaque.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.boxes import Box, Region, whole
from pipeline.models.strides import Run, Shape, contiguous_strides, run_box, split_runs

aten = torch.ops.aten

ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
COPIES = {aten.clone.default, aten._to_copy.default}
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


@dataclass(frozen=True, slots=True)
class _Held:
    """Box `source` of a source is box `target` of a tensor in memory, dimension d of the one along axes[d] of the other."""

    name: str
    source: Box
    target: Box
    axes: tuple[int, ...]

    def part(self, box: Box, offset: int, strides: tuple[int, ...]) -> Region | None:
        """Return what of it lies in `box` of the tensor in memory, which is copied to this offset with these strides."""
        both = self.target.intersect(box) if box != self.target else box
        if both is None:
            return None
        start, size, along = [], [], []
        for first, count, axis in zip(self.source.offset, self.source.size, self.axes, strict=True):
            inner = count > 1
            start.append(first + both.offset[axis] - self.target.offset[axis] if inner else first)
            size.append(both.size[axis] if inner else 1)
            along.append(strides[axis] if inner and both.size[axis] > 1 else 0)
        offset += sum((b - o) * s for b, o, s in zip(both.offset, box.offset, strides, strict=True))
        return Region(self.name, Box(tuple(start), tuple(size)), "", offset, tuple(along))


@dataclass(slots=True)
class _Home:
    """Contents of a tensor that owns its storage. Its shape is that of the storage: dimensions by falling stride."""

    shape: Shape
    held: list[_Held]
    background: float | None = None  # of the entries that `held` leaves; None: not known


@dataclass(slots=True)
class Writes:
    """Copies and fills of one raw parameter."""

    regions: list[Region] = field(default_factory=list)
    fills: list[tuple[int, Shape, Shape, float]] = field(default_factory=list)
    entries: int = 0  # but for fills before the first region

    def names(self) -> set[str]:
        return {region.name for region in self.regions}


class Recorder(TorchDispatchMode):
    """Follows copies of `sources` while it is on.

    sources: meta tensors by name, such as the tensors on disk. raw: parameters by (owner, name) whose writes are kept; of those
    that share memory only the first counts. Regions are given their parameter's name when they are recorded; before that their
    offset counts from a storage's start.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], raw: Mapping[tuple[str, str], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.homes: dict[int, _Home] = {}  # by storage
        self.names: dict[int, set[str]] = {}  # by storage: the sources that its values come from
        self.raw: dict[int, tuple[tuple[str, str], torch.Tensor]] = {}
        self.writes: dict[tuple[str, str], Writes] = defaultdict(Writes)
        self.opaque: dict[str, set[str]] = defaultdict(set)  # by owner: the sources of what was computed
        self.computed: set[str] = set()  # the operations that do more than move entries of sources
        self.shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self.keep: list[object] = [sources, raw]  # else a freed storage's key would come again
        for name, tensor in sources.items():
            box = whole(tuple(tensor.shape))
            self.homes[_storage(tensor)] = _Home(box.size, [_Held(name, box, box, tuple(range(tensor.dim())))])
            self.names[_storage(tensor)] = {name}
        for key, tensor in (raw or {}).items():
            self.raw.setdefault(_storage(tensor), (key, tensor))

    def read(self, view: torch.Tensor, like: torch.Tensor) -> tuple[list[Region], float | None] | None:
        """Return where a view's entries go when they are copied into `like`, and what goes where none comes from a source.

        None if the view was computed.
        """
        home = self.homes.get(_storage(view))
        if home is None:
            return None
        view = view.expand(like.shape)
        runs, found, entries = _runs(view, like), [], 0
        if runs is None:
            return [], None
        for part, starts in split_runs(runs, (view.storage_offset(), like.storage_offset()), (home.shape, None)):
            box, dims = run_box(part, 0, starts, home.shape)
            strides = [0] * len(home.shape)
            for run, dim in zip(part, dims, strict=True):
                strides[dim] = run[2]
            for held in home.held:
                if part_held := held.part(box, starts[1], tuple(strides)):
                    found.append(part_held)
                    entries += part_held.box.numel
        if entries == view.numel():
            return found, None
        return None if home.background is None else (found, home.background)

    def enter(self, tensor: torch.Tensor, background: float | None = None) -> _Home | None:
        """Return the home of a tensor that owns its storage; None if it is not dense, and it is forgotten."""
        order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
        dense = tensor.permute(order)
        self.keep.append(tensor)
        self.homes.pop(_storage(tensor), None)
        if not dense.is_contiguous() or tensor.storage_offset():
            return None
        return self.homes.setdefault(_storage(tensor), _Home(tuple(dense.shape), [], background))

    def hold(self, target: torch.Tensor, read: tuple[list[Region], float | None] | None) -> None:
        """Record that `target`, a view of a temporary, holds what was read."""
        home = self.homes.get(_storage(target))
        if home is None or read is None or read[1] not in (None, home.background):
            self.homes.pop(_storage(target), None)
            return
        for read_part in read[0]:
            for box, there, axes in self.boxes(read_part, home.shape):
                if any(held.target.intersect(there) for held in home.held):  # overwritten
                    self.homes.pop(_storage(target), None)
                    return
                home.held.append(_Held(read_part.name, box, there, axes))

    def boxes(self, region: Region, home: Shape) -> Iterator[tuple[Box, Box, tuple[int, ...]]]:
        """Yield (box of the source, box of the target, axes) of a region of a contiguous target of shape `home`.

        Dimension d of the one box goes along axes[d] of the other.
        """
        shape = self.shapes[region.name]
        steps = zip(region.box.size, contiguous_strides(shape), region.strides, strict=True)
        start = sum(map(operator.mul, region.box.offset, contiguous_strides(shape)))
        for part, starts in split_runs([run for run in steps if run[0] > 1], (start, region.offset), (shape, home)):
            (box, dims), (there, axes) = run_box(part, 0, starts, shape), run_box(part, 1, starts, home)
            along = dict(zip(dims, axes, strict=True))
            yield box, there, tuple(along.get(d, 0) for d in range(len(shape)))

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record `target.copy_(source)`."""
        known = self.raw.get(_storage(target))
        names = self.names.get(_storage(source), set())
        if known is None:
            self.keep.append(target)
            self.names.setdefault(_storage(target), set()).update(names)
            self.hold(target, self.read(source, target))
            return
        key, parameter = known
        read = self.read(source, target)
        if read is None:
            self.opaque[key[0]] |= names
            return
        regions, constant = read
        writes, shift = self.writes[key], parameter.storage_offset()
        if constant is not None:
            self.fill(target, constant, entries=0)
        writes.regions += [Region(r.name, r.box, key[1], r.offset - shift, r.strides) for r in regions]
        writes.entries += target.numel()

    def fill(self, target: torch.Tensor, value: float, entries: int | None = None) -> None:
        """Record `target.fill_(value)`. entries: how many to count as written."""
        known = self.raw.get(_storage(target))
        if known is not None:
            key, parameter = known
            writes = self.writes[key]
            view = target.storage_offset() - parameter.storage_offset(), tuple(target.shape), tuple(target.stride()), value
            writes.fills.append(view)
            if writes.regions:  # a fill that comes late must not hit what was written
                writes.entries += target.numel() if entries is None else entries
        elif target.nbytes == target.untyped_storage().nbytes():
            self.enter(target, value)
        else:
            self.homes.pop(_storage(target), None)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if op is aten.copy_.default and (_storage(args[0]) in self.raw or self.involved(args)):
            self.write(args[0], args[1])
            return args[0]  # a live tensor is not written either
        if op in (aten.fill_.Scalar, aten.zero_.default) and (_storage(args[0]) in self.raw or self.known(args[0])):
            self.fill(args[0], args[1] if op is aten.fill_.Scalar else 0.0)
            return args[0]
        if op is aten._to_copy.default:  # what has values keeps them, such as the numbers of this rank's experts
            kwargs["device"] = args[0].device
            kwargs.pop("pin_memory", None)
        result = op(*args, **kwargs)
        if op in EMPTY or op in ZEROS:
            self.enter(result, 0.0 if op in ZEROS else None)
            return result
        involved = self.involved((args, kwargs))
        if op._schema.is_mutable and (known := self.raw.get(_storage(args[0]))):  # computed in place
            self.opaque[known[0][0]] |= involved
        if involved:
            self.follow(op, args, result, involved)
        return result

    def follow(self, op, args: Sequence, result: object, names: set[str]) -> None:
        """Record what an operation on sources leaves in its results: views need nothing, copies are entered."""
        if op is aten.view.dtype or op._schema.is_mutable:  # other entries than before, in the same storage
            self.homes.pop(_storage(args[0]), None)
            self.computed.add(str(op))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or _storage(tensor) in self.raw:
                continue
            old = self.names.get(_storage(tensor))
            self.names[_storage(tensor)] = names if old is None else old | names
            if old is not None or (home := self.enter(tensor)) is None:
                continue
            parts = [(part, self.read(source, part)) for part, source in _parts(op, args, tensor)]
            if not parts:
                self.computed.add(str(op))
                continue
            backgrounds = {read[1] for _, read in parts if read and read[1] is not None} | _padding(op, args)
            home.background = backgrounds.pop() if len(backgrounds) == 1 else None
            for part, read in parts:
                self.hold(part, read)

    def involved(self, values: object) -> set[str]:
        """Return the sources of any of these."""
        found = [self.names.get(_storage(value)) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        found = [names for names in found if names]
        return found[0] if len(found) == 1 else set().union(*found)

    def known(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self.homes or _storage(tensor) in self.names


def _parts(op, args: Sequence, result: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the views of a new tensor, and of what each was copied; none if it was computed."""
    if op in COPIES:
        return [(result, args[0])]
    if op is aten.cat.default:
        dim = args[1] if len(args) > 1 else 0
        return list(zip(result.split([tensor.shape[dim] for tensor in args[0]], dim), args[0], strict=True))
    if op is aten.stack.default:
        return list(zip(result.unbind(args[1] if len(args) > 1 else 0), args[0], strict=True))
    if op is aten.constant_pad_nd.default and min(args[1]) >= 0:  # amounts from the last dimension on: before, after
        inner = result
        for i in range(len(args[1]) // 2):
            inner = inner.narrow(-1 - i, args[1][2 * i], args[0].shape[-1 - i])
        return [(inner, args[0])]
    if op is aten.index.Tensor and len(args[1]) == 1 and _are_rows(args[1][0]):
        return [(result[i], args[0][row]) for i, row in enumerate(args[1][0].tolist())]
    return []


def _are_rows(index: torch.Tensor) -> bool:
    return index.dim() == 1 and index.dtype is torch.int64 and not index.is_meta


def _padding(op, args: Sequence) -> set[float]:
    """Return the value that an operation puts around its argument."""
    return {float(args[2]) if len(args) > 2 else 0.0} if op is aten.constant_pad_nd.default else set()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # views of a meta tensor share its storage


def _runs(view: torch.Tensor, like: torch.Tensor) -> list[Run] | None:
    """Return (count, stride in the view, stride in `like`) by falling stride in the view, merged; None without entries."""
    steps = sorted(zip(view.shape, view.stride(), like.stride(), strict=True), key=lambda step: -step[1])
    runs: list[Run] = []
    for count, stride, far in steps:
        if count == 0:
            return None
        if count == 1:
            continue
        if runs and runs[-1][1] == count * stride and runs[-1][2] == count * far:  # one longer run
            runs[-1] = (runs[-1][0] * count, stride, far)
        else:
            runs.append((count, stride, far))
    return runs
