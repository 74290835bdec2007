"""Record which box of which source tensor a function or a weight loader copies where. It runs on meta tensors.

Views share their tensor's storage, so an offset and strides describe them, and operations on views need no rule. Operations
that allocate storage have rules: contiguous, a change of dtype, cat, stack, padding, rows by index, copies into empty or zero
tensors. Constants are recorded as fills. Computed values cannot be recorded: the owner of a parameter that receives them counts
as opaque.
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
class _SourceBox:
    """A box `source` of a source tensor whose entries are in box `target` of a tensor in memory.

    Dimension d of `source` lies along dimension axes[d] of `target`.
    """

    name: str
    source: Box
    target: Box
    axes: tuple[int, ...]

    def part(self, box: Box, offset: int, strides: tuple[int, ...]) -> Region | None:
        """Return the region that gets source entries when `box` of the tensor in memory is copied to another storage.

        offset, strides: position of `box` in this other storage. Return None if no source entries lie in `box`.
        """
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
class _Contents:
    """The contents of a tensor that owns its storage. `shape` lists the dimensions by descending stride."""

    shape: Shape
    boxes: list[_SourceBox]
    background: float | None = None  # value of the entries outside `boxes`; None: unknown


@dataclass(slots=True)
class Writes:
    """The copies and fills that one raw parameter receives."""

    regions: list[Region] = field(default_factory=list)
    fills: list[tuple[int, Shape, Shape, float]] = field(default_factory=list)
    entries: int = 0  # written entries, without fills before the first region

    def names(self) -> set[str]:
        """Return the names of the sources that are copied into the parameter."""
        return {region.name for region in self.regions}


class Recorder(TorchDispatchMode):
    """A dispatch mode that records copies of `sources`.

    sources: name -> meta tensor, such as the tensors on disk. raw: (owner, name) -> parameter whose writes are recorded. Of
    several parameters that share memory, only the first counts. Offsets of regions count from the start of a storage until
    the region is recorded for a parameter; then it gets the parameter's name, and its offset counts from the parameter's start.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], raw: Mapping[tuple[str, str], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.contents: dict[int, _Contents] = {}  # by storage
        self.names: dict[int, set[str]] = {}  # by storage: the sources of its values
        self.raw: dict[int, tuple[tuple[str, str], torch.Tensor]] = {}
        self.writes: dict[tuple[str, str], Writes] = defaultdict(Writes)
        self.opaque: dict[str, set[str]] = defaultdict(set)  # by owner: the sources of computed values
        self.computed: set[str] = set()  # operations that do more than move entries of sources
        self.shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self.references: list[object] = [sources, raw]  # otherwise a freed storage's key could be reused
        for name, tensor in sources.items():
            box = whole(tuple(tensor.shape))
            self.contents[_storage(tensor)] = _Contents(box.size, [_SourceBox(name, box, box, tuple(range(tensor.dim())))])
            self.names[_storage(tensor)] = {name}
        for key, tensor in (raw or {}).items():
            self.raw.setdefault(_storage(tensor), (key, tensor))

    def read(self, view: torch.Tensor, like: torch.Tensor) -> tuple[list[Region], float | None] | None:
        """Return (the regions that a copy of `view` into `like` writes, the constant of the entries without a source).

        The constant is None if all entries have sources. Return None if values of `view` are computed or unknown.
        """
        contents = self.contents.get(_storage(view))
        if contents is None:
            return None
        view = view.expand(like.shape)
        runs, found, entries = _runs(view, like), [], 0
        if runs is None:
            return [], None
        for part, starts in split_runs(runs, (_offset(view), _offset(like)), (contents.shape, None)):
            box, dims = run_box(part, 0, starts, contents.shape)
            strides = [0] * len(contents.shape)
            for run, dim in zip(part, dims, strict=True):
                strides[dim] = run[2]
            for source_box in contents.boxes:
                if region := source_box.part(box, starts[1], tuple(strides)):
                    found.append(region)
                    entries += region.box.numel
        if entries == view.numel():
            return found, None
        return None if contents.background is None else (found, contents.background)

    def track(self, tensor: torch.Tensor, background: float | None = None) -> _Contents | None:
        """Start to track a tensor that owns its storage, and return its contents; None if it is not dense."""
        order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
        dense = tensor.permute(order)
        self.references.append(tensor)
        self.contents.pop(_storage(tensor), None)
        if not dense.is_contiguous() or tensor.storage_offset():
            return None
        return self.contents.setdefault(_storage(tensor), _Contents(tuple(dense.shape), [], background))

    def record_contents(self, target: torch.Tensor, read: tuple[list[Region], float | None] | None) -> None:
        """Record that `target`, a view of a temporary tensor, contains `read`, a result of the method `read`."""
        contents = self.contents.get(_storage(target))
        if contents is None or read is None or read[1] not in (None, contents.background):
            self.contents.pop(_storage(target), None)
            return
        for read_part in read[0]:
            for box, target_box, axes in self.boxes(read_part, contents.shape):
                if any(source_box.target.intersect(target_box) for source_box in contents.boxes):  # overwritten
                    self.contents.pop(_storage(target), None)
                    return
                contents.boxes.append(_SourceBox(read_part.name, box, target_box, axes))

    def boxes(self, region: Region, target_shape: Shape) -> Iterator[tuple[Box, Box, tuple[int, ...]]]:
        """Yield (box of the source, box of the target, axes) for the boxes of a region of a contiguous target.

        Dimension d of the source's box lies along dimension axes[d] of the target's box.
        """
        shape = self.shapes[region.name]
        steps = zip(region.box.size, contiguous_strides(shape), region.strides, strict=True)
        start = sum(map(operator.mul, region.box.offset, contiguous_strides(shape)))
        for part, starts in split_runs([run for run in steps if run[0] > 1], (start, region.offset), (shape, target_shape)):
            (box, dims), (target_box, axes) = run_box(part, 0, starts, shape), run_box(part, 1, starts, target_shape)
            along = dict(zip(dims, axes, strict=True))
            yield box, target_box, tuple(along.get(d, 0) for d in range(len(shape)))

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Record `target.copy_(source)`."""
        known = self.raw.get(_storage(target))
        names = self.names.get(_storage(source), set())
        if known is None:
            self.references.append(target)
            self.names.setdefault(_storage(target), set()).update(names)
            self.record_contents(target, self.read(source, target))
            return
        key, parameter = known
        read = self.read(source, target)
        if read is None:
            self.opaque[key[0]] |= names
            return
        regions, constant = read
        writes, shift = self.writes[key], _offset(parameter)
        if constant is not None:
            self.fill(target, constant, entries=0)
        writes.regions += [Region(r.name, r.box, key[1], r.offset - shift, r.strides) for r in regions]
        writes.entries += target.numel()

    def fill(self, target: torch.Tensor, value: float, entries: int | None = None) -> None:
        """Record `target.fill_(value)`. entries: how many entries count as written; None means all."""
        known = self.raw.get(_storage(target))
        if known is not None:
            key, parameter = known
            writes = self.writes[key]
            view = _offset(target) - _offset(parameter), tuple(target.shape), tuple(target.stride()), value
            writes.fills.append(view)
            if writes.regions:  # a late fill must not overwrite regions
                writes.entries += target.numel() if entries is None else entries
        elif target.nbytes == target.untyped_storage().nbytes():
            self.track(target, value)
        else:
            self.contents.pop(_storage(target), None)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if op is aten.copy_.default and (_storage(args[0]) in self.raw or self.sources_of(args)):
            self.write(args[0], args[1])
            return args[0]  # the mode writes to no tensor
        if op in (aten.fill_.Scalar, aten.zero_.default) and (_storage(args[0]) in self.raw or self.is_tracked(args[0])):
            self.fill(args[0], args[1] if op is aten.fill_.Scalar else 0.0)
            return args[0]
        if op is aten._to_copy.default:  # tensors with values keep them, such as the indices of this rank's experts
            kwargs["device"] = args[0].device
            kwargs.pop("pin_memory", None)
        result = op(*args, **kwargs)
        if op in EMPTY or op in ZEROS:
            self.track(result, 0.0 if op in ZEROS else None)
            return result
        involved = self.sources_of((args, kwargs))
        if op._schema.is_mutable and (known := self.raw.get(_storage(args[0]))):  # computed in place
            self.opaque[known[0][0]] |= involved
        if involved:
            self.follow(op, args, result, involved)
        return result

    def follow(self, op, args: Sequence, result: object, names: set[str]) -> None:
        """Record the results of an operation on the sources `names`. Views need no record; copies are tracked."""
        if op is aten.view.dtype or op._schema.is_mutable:  # the storage has other entries than before
            self.contents.pop(_storage(args[0]), None)
            self.computed.add(str(op))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or _storage(tensor) in self.raw:
                continue
            old = self.names.get(_storage(tensor))
            self.names[_storage(tensor)] = names if old is None else old | names
            if old is not None or (contents := self.track(tensor)) is None:
                continue
            parts = [(part, self.read(source, part)) for part, source in _parts(op, args, tensor)]
            if not parts:
                self.computed.add(str(op))
                continue
            backgrounds = {read[1] for _, read in parts if read and read[1] is not None} | _padding(op, args)
            contents.background = backgrounds.pop() if len(backgrounds) == 1 else None
            for part, read in parts:
                self.record_contents(part, read)

    def sources_of(self, values: object) -> set[str]:
        """Return the names of all sources from which these values come."""
        found = [self.names.get(_storage(value)) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        found = [names for names in found if names]
        return found[0] if len(found) == 1 else set().union(*found)

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Return whether the contents or the sources of a tensor's storage are recorded."""
        return _storage(tensor) in self.contents or _storage(tensor) in self.names


def _parts(op, args: Sequence, result: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs (view of the new tensor `result`, the tensor of which it is a copy); empty if the result was computed."""
    if op in COPIES:
        return [(result, args[0])]
    if op is aten.cat.default:
        dim = args[1] if len(args) > 1 else 0
        return list(zip(result.split([tensor.shape[dim] for tensor in args[0]], dim), args[0], strict=True))
    if op is aten.stack.default:
        return list(zip(result.unbind(args[1] if len(args) > 1 else 0), args[0], strict=True))
    if op is aten.constant_pad_nd.default and min(args[1]) >= 0:  # (before, after) amounts, from the last dimension on
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
    """Return a set with the constant that a padding operation adds; an empty set for other operations."""
    return {float(args[2]) if len(args) > 2 else 0.0} if op is aten.constant_pad_nd.default else set()


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # views of a meta tensor share its storage


def _runs(view: torch.Tensor, like: torch.Tensor) -> list[Run] | None:
    """Return merged runs (count, stride in `view`, stride in `like`) by descending stride in `view`; None if it is empty."""
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
