"""Gather whole Hugging Face tensors on rank 0 of the train component from the boxes that ranks hold.

All ranks exchange the list of their boxes once. For each box, the lowest rank that holds it is chosen, because replicas are
equal. Then, one tensor at a time, each chosen rank sends its boxes to rank 0, which needs memory for one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist

from pipeline.boxes import Box, Piece, whole
from pipeline.models.precision import served_dtype
from pipeline.train.megatron.collectives import all_gather_bytes


class HeldBox(msgspec.Struct, array_like=True):
    """A box of a Hugging Face tensor that a rank holds."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> Box:
        """This box as a `Box`, a class that msgspec does not encode."""
        return Box(self.offset, self.size)


BoxesByTensor = dict[str, list[HeldBox]]


class WeightGatherer:
    """Gathers the weights of a model on rank 0."""

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
            mine.setdefault(name, []).append(HeldBox(box.offset, box.size))
        tables = [
            msgspec.msgpack.decode(body, type=BoxesByTensor) for body in all_gather_bytes(group, msgspec.msgpack.encode(mine))
        ]
        # Every rank has all tables, so all make the same choice.
        self._chosen: dict[str, list[tuple[int, Box]]] = {name: [] for name in shapes}
        seen: set[tuple[str, Box]] = set()
        for rank, table in enumerate(tables):
            for name, offers in table.items():
                for box in (offer.box for offer in offers):
                    if (name, box) not in seen:
                        seen.add((name, box))
                        self._chosen[name].append((rank, box))
        for name, chosen in self._chosen.items():
            if sum(box.numel for _, box in chosen) != whole(shapes[name]).numel:
                raise ValueError(
                    f"weights: the ranks' boxes of {name} {list(shapes[name])} do not cover the tensor: {chosen[:4]}"
                )

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
            mine = [self._part(name, box, dtype).flatten() for owner, box in self._chosen[name] if owner == rank]
            if mine:
                dist.send(torch.cat(mine), group_dst=0, group=self._group)
            yield name, torch.empty(0, dtype=dtype, device=self._device)

    def _assemble(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        full = torch.empty(shape, dtype=dtype, device=self._device)
        owners: dict[int, list[Box]] = {}
        for owner, box in self._chosen[name]:
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
