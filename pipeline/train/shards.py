"""Tensors in files, of which each rank holds a box: an offset and a size in every dimension of the whole tensor.

A rank writes its boxes to `train-rank00000.safetensors` with a JSON index beside it, and reads whatever boxes it needs from all
ranks' files, so a checkpoint loads at any layout. A Hugging Face checkpoint is the case where every box is a whole tensor.
No pickle. Boxes that several ranks hold (replicas) are written by each of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from pipeline.boxes import Box, whole
from pipeline.checkpoint import sync


def local_box(tensor: torch.Tensor) -> Box:
    """Which part of the whole tensor this rank holds."""
    box = whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return box
    offset, size = list(box.offset), list(box.size)
    mesh = tensor.device_mesh
    # The last mesh dimension cuts first: tensor parallelism, then fully_shard cuts what that left.
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = tensor.placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        dim, parts, part = placement.dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        step = -(-size[dim] // parts)  # torch.chunk: equal parts, the last ones shorter or empty
        start = min(part * step, size[dim])
        offset[dim] += start
        size[dim] = min(step, size[dim] - start)
    box = Box(tuple(offset), tuple(size))
    if box.size != tuple(tensor.to_local().shape):
        raise AssertionError(f"box {box} is not what this rank holds, {tuple(tensor.to_local().shape)}, of {tensor.placements}")
    return box


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank holds, without a graph and without a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    box: Box


class BoxReader:
    """Reads any box of any tensor, whichever files its parts lie in."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Stored]] = {}
        self._files: dict[Path, Any] = {}

    def add(self, name: str, shape: tuple[int, ...], path: Path, box: Box) -> None:
        if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
            raise ValueError(f"{path}: '{name}' has shape {tuple(shape)} here and {self.shapes[name]} in another file")
        pieces = self._pieces.setdefault(name, [])
        if all(box != piece.box for piece in pieces):  # else a replica
            pieces.append(_Stored(path, box))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That box of the tensor, on the CPU. Raises ValueError if the files do not hold all of it."""
        if name not in self._pieces:
            raise ValueError(f"there is no tensor '{name}'")
        out, found = None, 0
        for piece in self._pieces[name]:
            part = box if box.numel == 0 else box.intersect(piece.box)
            if part is None:
                continue
            data = self._slice(piece, name, part)
            if part == box:
                return data
            out = torch.empty(box.size, dtype=data.dtype) if out is None else out
            out[part.within(box)] = data
            found += part.numel
        if found != box.numel:
            raise ValueError(f"'{name}': the files hold {found} of the {box.numel} elements of {box}")
        return out

    def _slice(self, piece: _Stored, name: str, part: Box) -> torch.Tensor:
        if piece.path not in self._files:
            self._files[piece.path] = safe_open(piece.path, framework="pt")
        file = self._files[piece.path]
        if part.numel == 0:
            return torch.empty(part.size, dtype=file.get_tensor(name).dtype)
        if part == piece.box:
            return file.get_tensor(name)
        return file.get_slice(name)[part.within(piece.box)]


def write_shards(folder: Path, rank: int, tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Write this rank's boxes of `tensors`, and `record` (JSON) with the index; both are on the disk when this returns."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **_json(local_box(tensor))}
        for name, tensor in tensors.items()
    }
    stem = folder / f"train-rank{rank:05d}"
    save_file({name: local(tensor).cpu().contiguous() for name, tensor in tensors.items()}, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps({**record, "tensors": index}))
    for path in (stem.with_suffix(".safetensors"), stem.with_suffix(".json"), folder):
        sync(path)


def _json(box: Box) -> dict[str, list[int]]:
    return {"offset": list(box.offset), "size": list(box.size)}


def read_shards(folder: Path) -> tuple[BoxReader, list[dict[str, Any]]]:
    """(reader of all ranks' boxes, all ranks' records). Raises ValueError if a rank's file is missing."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("train-rank*.json"))]
    if not records or len(records) != records[0]["ranks"]:
        raise ValueError(
            f"{folder}: {len(records)} of {records[0]['ranks'] if records else 'the'} train-rank*.json files are there"
        )
    reader = BoxReader()
    for rank, record in enumerate(records):
        path = folder / f"train-rank{rank:05d}.safetensors"
        for name, entry in record["tensors"].items():
            reader.add(name, entry["shape"], path, Box(tuple(entry["offset"]), tuple(entry["size"])))
    return reader, records
