"""Watches a weight loader run on meta tensors: which box of which tensor on disk is copied where.

Views share their tensor's storage, so an offset and strides say what goes where. Temporaries (contiguous, a change of dtype,
cat, stack, rows by number, copies into empty or zero tensors) are followed; constants are kept as fills. What is computed is
not expressed: it makes the owner of the parameter opaque. Nothing here knows vLLM.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.boxes import Box, Region, whole
from pipeline.models.layout import COPIES, ZEROS, Run, Shape, contiguous_strides, peel, run_box

aten = torch.ops.aten

EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


@dataclass(frozen=True, slots=True)
class _Held:
    """Box `source` of a tensor on disk is box `target` of one in memory, dimension d of the one along axes[d] of the other."""

    name: str
    source: Box
    target: Box
    axes: tuple[int, ...]

    def part(self, box: Box, offset: int, strides: tuple[int, ...]) -> Region | None:
        """What of it lies in `box` of the tensor in memory, whose entries are copied to this offset with these strides."""
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
    """What a tensor that owns its storage holds. Its shape is that of the storage: dimensions by falling stride."""

    shape: Shape
    held: list[_Held]
    background: float | None = None  # of the entries that `held` leaves; None: not known


@dataclass(slots=True)
class Writes:
    """What was written into one raw parameter."""

    regions: list[Region] = field(default_factory=list)
    fills: list[tuple[int, Shape, Shape, float]] = field(default_factory=list)
    entries: int = 0  # but for fills before the first region

    def names(self) -> set[str]:
        return {region.name for region in self.regions}


class Recorder(TorchDispatchMode):
    """sources: tensors on disk, by name. raw: parameters, by (owner, name); of those that share memory only the first counts.

    Regions are given their parameter's name when they are recorded; before that their offset counts from a storage's start.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], raw: Mapping[tuple[str, str], torch.Tensor]) -> None:
        super().__init__()
        self.homes: dict[int, _Home] = {}  # by storage
        self.names: dict[int, set[str]] = {}  # by storage: the tensors on disk that its values come from
        self.raw: dict[int, tuple[tuple[str, str], torch.Tensor]] = {}
        self.writes: dict[tuple[str, str], Writes] = defaultdict(Writes)
        self.opaque: dict[str, set[str]] = defaultdict(set)  # by owner: the tensors on disk behind what was computed
        self.shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self.keep: list[object] = [sources, raw]  # else a freed storage's key would come again
        for name, tensor in sources.items():
            box = whole(tuple(tensor.shape))
            self.homes[_storage(tensor)] = _Home(box.size, [_Held(name, box, box, tuple(range(tensor.dim())))])
            self.names[_storage(tensor)] = {name}
        for key, tensor in raw.items():
            self.raw.setdefault(_storage(tensor), (key, tensor))

    def read(self, view: torch.Tensor, like: torch.Tensor) -> tuple[list[Region], float | None] | None:
        """Where a view's entries go when they are copied into `like`, and what goes where none comes from a tensor on disk.
        None if the view was computed."""
        home = self.homes.get(_storage(view))
        if home is None:
            return None
        view = view.expand(like.shape)
        runs, found, entries = _runs(view, like), [], 0
        if runs is None:
            return [], None
        for part, starts in peel(runs, (view.storage_offset(), like.storage_offset()), (home.shape, None)):
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
        """Know a tensor that owns its storage; None, and forget it, if it is not dense."""
        order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
        dense = tensor.permute(order)
        self.keep.append(tensor)
        self.homes.pop(_storage(tensor), None)
        if not dense.is_contiguous() or tensor.storage_offset():
            return None
        return self.homes.setdefault(_storage(tensor), _Home(tuple(dense.shape), [], background))

    def hold(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target`, a view of a temporary, now holds what `source` does."""
        home, read = self.homes.get(_storage(target)), self.read(source, target)
        if home is None or read is None or read[1] not in (None, home.background):
            self.homes.pop(_storage(target), None)
            return
        for read_part in read[0]:
            shape = self.shapes[read_part.name]
            steps = zip(read_part.box.size, contiguous_strides(shape), read_part.strides, strict=True)
            start = sum(map(operator.mul, read_part.box.offset, contiguous_strides(shape)))
            for part, starts in peel([run for run in steps if run[0] > 1], (start, read_part.offset), (shape, home.shape)):
                (box, dims), (there, axes) = run_box(part, 0, starts, shape), run_box(part, 1, starts, home.shape)
                if any(held.target.intersect(there) for held in home.held):  # overwritten
                    self.homes.pop(_storage(target), None)
                    return
                along = dict(zip(dims, axes, strict=True))
                home.held.append(_Held(read_part.name, box, there, tuple(along.get(d, 0) for d in range(len(shape)))))

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`."""
        known = self.raw.get(_storage(target))
        names = self.names.get(_storage(source), set())
        if known is None:
            self.keep.append(target)
            self.names.setdefault(_storage(target), set()).update(names)
            self.hold(target, source)
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
        """`target.fill_(value)`; entries: how many to count as written."""
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
        """What an operation on tensors from disk leaves in its results: views need nothing, copies are entered."""
        if op is aten.view.dtype or op._schema.is_mutable:  # other entries than before, in the same storage
            self.homes.pop(_storage(args[0]), None)
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or _storage(tensor) in self.raw:
                continue
            old = self.names.get(_storage(tensor))
            self.names[_storage(tensor)] = names if old is None else old | names
            if old is not None or self.enter(tensor) is None:
                continue
            for part, source in _parts(op, args, tensor):
                self.hold(part, source)

    def involved(self, values: object) -> set[str]:
        """The tensors on disk behind any of these."""
        found = [self.names.get(_storage(value)) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        found = [names for names in found if names]
        return found[0] if len(found) == 1 else set().union(*found)

    def known(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self.homes or _storage(tensor) in self.names


def _parts(op, args: Sequence, result: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The views of a new tensor, and of what each was copied; none if it was computed."""
    if op in COPIES:
        return [(result, args[0])]
    if op is aten.cat.default:
        dim = args[1] if len(args) > 1 else 0
        return list(zip(result.split([tensor.shape[dim] for tensor in args[0]], dim), args[0], strict=True))
    if op is aten.stack.default:
        return list(zip(result.unbind(args[1] if len(args) > 1 else 0), args[0], strict=True))
    if op is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dim() == 1 and args[1][0].dtype is torch.int64:  # rows
        return [(result[i], args[0][row]) for i, row in enumerate(args[1][0].tolist())]
    return []


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # views of a meta tensor share its storage


def _runs(view: torch.Tensor, like: torch.Tensor) -> list[Run] | None:
    """(count, stride in the view, stride in `like`), by falling stride in the view, as long as can be; None: no entries."""
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
