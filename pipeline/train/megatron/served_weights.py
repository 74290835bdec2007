"""The tensors of a rank that refits and exports read: weights, with adapters merged into them, or the adapters' own tensors.

An A that several projections share is one parameter here. It is served once under the name of each projection, as peft and vLLM
expect.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist

from pipeline.boxes import Box, Piece, Region, region, whole
from pipeline.models.precision import served_dtype
from pipeline.models.recorded_layout import Shape
from pipeline.train.host_messages import all_gather_bytes
from pipeline.train.megatron.adapted_stage import StageAdapters
from pipeline.train.megatron.local_tensors import LocalTensor
from pipeline.train.megatron.saved_state import is_data_parallel_leader


class ServedWeights:
    """Serves the tensors of a rank to refits and exports."""

    def __init__(
        self,
        local: Mapping[str, LocalTensor],
        base: Mapping[str, LocalTensor],
        shapes: Mapping[str, Shape],
        adapters: StageAdapters | None,
        serves_adapters: bool,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """local: all tensors of this rank; base: these without the adapters; shapes: {name: shape} of the model on disk.

        serves_adapters: whether `layout`, `shapes` and `tensors` return the adapters, if there are any. Without adapters the
        constructor is collective, and raises ValueError if the ranks do not hold every weight.
        """
        self._local, self._base, self._adapters = local, base, adapters
        self._group, self._device = group, device
        self._model_shapes = dict(shapes)
        self._merged: dict[str, torch.Tensor] = {}  # merged weights by name, from the first read on
        self._serves_adapters = serves_adapters and adapters is not None
        if adapters is None:
            assert self._of_model  # raises if the ranks do not hold every weight

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor on disk that is served."""
        return self._adapters.shapes if self._adapters and self._serves_adapters else self._model_shapes

    @property
    def merged(self) -> list[torch.Tensor]:
        """The merged weights, which have memory of their own; empty until they are read for the first time."""
        return list(self._merged.values())

    def read(self) -> list[torch.Tensor]:
        """Return this rank's tensors that a refit reads."""
        return [self.tensor(name) for name in self._served]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of this rank by its name, without a graph. It is the merged weight if there is one."""
        return self._merged[name] if name in self._merged else self._local[name].tensor.detach()

    def layout(self) -> list[Region]:
        """Return the regions of the served tensors that this rank holds. Collective with DoRA."""
        self.merge()
        return [
            region(piece, name, local_tensor.tensor.stride())
            for name, local_tensor in self._served.items()
            for piece in self._pieces(local_tensor)
        ]

    def tensors(self, precision: torch.dtype, model: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole tensor that is served, as `WeightGatherer.tensors` does. Collective.

        model: yield the model's weights, merged with its adapters, even if adapters are served.
        """
        if self._serves_adapters and not model:
            yield from self._of_adapters.tensors(precision)
        else:
            self.merge(always=True)
            yield from self._of_model.tensors(precision)

    # ---- merged weights -------------------------------------------------------------------------------------------------

    def merge(self, always: bool = False) -> None:
        """Merge the adapters into separate tensors for a reader of the weights, which `refresh` then updates.

        It does nothing if adapters are served, unless `always` is True. Collective with DoRA.
        """
        if self._adapters and not self._merged and (always or not self._serves_adapters):
            self._merged = dict(self._adapters.merged())

    def refresh(self) -> None:
        """Merge the current adapters again, if `merge` has merged them before. Collective with DoRA."""
        if self._adapters and self._merged:
            for name, tensor in self._adapters.merged():
                self._merged[name].copy_(tensor)

    # ---- parts ----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _served(self) -> Mapping[str, LocalTensor]:
        """The tensors of this rank that are served, by name."""
        if not self._serves_adapters:
            return self._base
        return {name: local_tensor for name, local_tensor in self._local.items() if name not in self._base}

    def _pieces(self, local_tensor: LocalTensor) -> list[Piece]:
        """Return a tensor's pieces of tensors on disk, once under each name of a tensor on disk."""
        copies = self._adapters.copies if self._adapters else {}
        names = ((piece, name) for piece in local_tensor.hugging_face for name in (piece.name, *copies.get(piece.name, ())))
        return [Piece(name, piece.source, piece.target) for piece, name in names]

    @functools.cached_property
    def _of_model(self) -> WeightGatherer:
        """Gathers the model's weights. With adapters, use it only after they are merged for the first time."""
        return self._gatherer(self._base, self._model_shapes)

    @functools.cached_property
    def _of_adapters(self) -> WeightGatherer:
        return self._gatherer(self._served, self.shapes)

    def _gatherer(self, of: Mapping[str, LocalTensor], shapes: Mapping[str, Shape]) -> WeightGatherer:
        leaders = {name: local_tensor for name, local_tensor in of.items() if is_data_parallel_leader(name)}
        # The parameters themselves: `HostWeights` changes the memory that they refer to, and what is left has to be freed.
        pieces = [
            (self._merged.get(name, local_tensor.tensor), self._pieces(local_tensor)) for name, local_tensor in leaders.items()
        ]
        return WeightGatherer(pieces, shapes, self._group, self._device)


# ---- whole tensors ------------------------------------------------------------------------------------------------------


BoxesByTensor = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""{Hugging Face tensor: (offset, size) of each box that a rank holds}: `Box` is a class that msgspec does not encode."""


class WeightGatherer:
    """Gathers whole Hugging Face tensors on rank 0 of the train component from the boxes that ranks hold.

    All ranks exchange the list of their boxes once. For each box, the lowest rank that holds it is chosen, because replicas are
    equal. Then, one tensor at a time, each chosen rank sends its boxes to rank 0, which needs memory for one whole tensor.
    """

    def __init__(
        self,
        local: list[tuple[torch.Tensor, list[Piece]]],
        shapes: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """local: (tensor, its pieces of Hugging Face tensors) of this rank. Tensors that another rank passes may be left out.

        shapes: {name: shape} of all Hugging Face tensors, in the order in which `tensors` yields them. Collective. Raises
        ValueError if the ranks' boxes do not cover every tensor.
        """
        self._shapes = shapes
        self._group = group
        self._held = {(piece.name, piece.source): (tensor, piece.target) for tensor, pieces in local for piece in pieces}
        self._device = device
        mine: BoxesByTensor = {}
        for name, box in self._held:
            mine.setdefault(name, []).append((box.offset, box.size))
        tables = [
            msgspec.msgpack.decode(body, type=BoxesByTensor) for body in all_gather_bytes(group, msgspec.msgpack.encode(mine))
        ]
        # {name: {box: its first holder}}: every rank has all tables, so all make the same choice.
        self._chosen: dict[str, dict[Box, int]] = {name: {} for name in shapes}
        for rank, table in enumerate(tables):
            for name, boxes in table.items():
                for box in boxes:
                    self._chosen[name].setdefault(Box(*box), rank)
        for name, chosen in self._chosen.items():
            if sum(box.numel for box in chosen) != whole(shapes[name]).numel:
                held = list(chosen)[:4]
                raise ValueError(f"weights: the ranks' boxes of {name} {list(shapes[name])} do not cover the tensor: {held}")

    def tensors(self, precision: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) on rank 0 and (name, empty tensor) on other ranks.

        Collective: all ranks must exhaust it. precision: the dtype of all tensors but those served in another dtype.
        """
        rank = self._group.rank()
        for name, shape in self._shapes.items():
            dtype = served_dtype(name, precision)
            if rank == 0:
                yield name, self._assemble(name, shape, dtype)
                continue
            mine = [self._part(name, box, dtype).flatten() for box, owner in self._chosen[name].items() if owner == rank]
            if mine:
                dist.send(torch.cat(mine), group_dst=0, group=self._group)
            yield name, torch.empty(0, dtype=dtype, device=self._device)

    def _assemble(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        full = torch.empty(shape, dtype=dtype, device=self._device)
        owners: dict[int, list[Box]] = {}
        for box, owner in self._chosen[name].items():
            owners.setdefault(owner, []).append(box)
        for owner, boxes in owners.items():
            if owner == 0:
                parts = [self._part(name, box, dtype) for box in boxes]
            else:
                flat = torch.empty(sum(box.numel for box in boxes), dtype=dtype, device=self._device)
                dist.recv(flat, group_src=owner, group=self._group)
                parts = list(flat.split([box.numel for box in boxes]))
            for box, part in zip(boxes, parts, strict=True):
                full[box.within(whole(shape))] = part.view(box.size)
        return full

    def _part(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        tensor, target = self._held[name, box]
        return tensor.detach()[target.within(whole(tuple(tensor.shape)))].to(dtype).reshape(box.size)
