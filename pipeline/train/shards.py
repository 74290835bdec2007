"""Write and read tensors in sharded files. Each rank holds boxes: an offset and a size in every dimension of a whole tensor.

A rank writes its boxes to `train-rank00000.safetensors` with a JSON index next to it. It reads the boxes that it needs from all
ranks' files, so a checkpoint loads with any layout. In a Hugging Face checkpoint every box is a whole tensor. Nothing is
pickled. If several ranks hold the same box (replicas), only the first of them should pass it to `collect_shards`: every rank
that passes a box writes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from pipeline.boxes import Box, chunk, whole
from pipeline.files.storage import NO_RETRIES, RetryPolicy, retrying
from pipeline.files.stored_files import FileKey, is_encrypted, read_bytes, write_bytes
from pipeline.train.tensor_files import EncryptedTensors, write_tensors


def local_box(tensor: torch.Tensor, place: Mapping[str, int] | None = None) -> Box:
    """Return the box of the whole tensor that this rank holds, or the rank at `place`: dimension of a mesh -> coordinate."""
    box = whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return box
    mesh = tensor.device_mesh
    # The last mesh dimension cuts first: tensor parallelism cuts the tensor, then fully_shard cuts the parts.
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = tensor.placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, (Shard, _StridedShard))  # parameters are never partial sums
        names = mesh.mesh_dim_names or ()
        coordinate = mesh.get_local_rank(mesh_dim) if place is None else place[names[mesh_dim]]
        box = chunk(box, placement.dim, mesh.size(mesh_dim), coordinate)
    if place is None and box.size != tuple(tensor.to_local().shape):
        raise AssertionError(f"got local shape {tuple(tensor.to_local().shape)} for {tensor.placements}; expected {box}")
    return box


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without a graph and without a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_holder(tensor: torch.Tensor, rank: int) -> bool:
    """Return whether this rank is the first of the ranks that hold the same part of `tensor`.

    rank: this rank's number in the train component.
    """
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    replicated = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    # A mesh may have only some of the component's ranks; the other ranks then have meshes with the same parts.
    return 0 in mesh.mesh.flatten().tolist() and all(mesh.get_local_rank(dim) == 0 for dim in replicated)


def gather_full(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, gathered from parts that are placed like the parts of `tensor`. Collective.

    part: this rank's part. It may differ from the part of `tensor` in dtype and device.
    """
    if not isinstance(tensor, DTensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()


Entry = tuple[str, tuple[int, ...], Box, torch.Tensor]
"""(name, shape of the whole tensor, box, the tensor's values in this box). A name may occur with several boxes."""


@dataclass(frozen=True, slots=True)
class _StoredBox:
    path: Path
    key: str  # the box's name in the file
    box: Box


class BoxReader:
    """Reads any box of any tensor from all files that contain parts of it."""

    def __init__(self, key: FileKey | None = None) -> None:
        """key: decrypts encrypted files."""
        self._key = key
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_StoredBox]] = {}
        self._files: dict[Path, Any] = {}

    def add(self, name: str, shape: tuple[int, ...], path: Path, box: Box, key: str | None = None) -> None:
        """Register that the file at `path` holds `box` of the tensor `name`, under `key` (None: under its name)."""
        if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
            raise ValueError(f"{path}: '{name}' has shape {tuple(shape)} here and {self.shapes[name]} in another file")
        pieces = self._pieces.setdefault(name, [])
        if all(box != piece.box for piece in pieces):  # otherwise a replica
            pieces.append(_StoredBox(path, name if key is None else key, box))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return this box of the tensor, on the CPU.

        Raises ValueError if the files do not contain the whole box, RecipeError if a file is encrypted with another key or is
        damaged.
        """
        if name not in self._pieces:
            raise ValueError(f"there is no tensor '{name}'")
        out, entries = None, 0
        for piece in self._pieces[name]:
            part = box if box.numel == 0 else box.intersect(piece.box)
            if part is None:
                continue
            data = self._slice(piece, part)
            if part == box:
                return data
            out = torch.empty(box.size, dtype=data.dtype) if out is None else out
            out[part.within(box)] = data
            entries += part.numel
        if out is None or entries != box.numel:
            raise ValueError(f"'{name}': the files hold {entries} of the {box.numel} elements of {box}")
        return out

    def _slice(self, piece: _StoredBox, part: Box) -> torch.Tensor:
        file = self._file(piece.path)
        if part.numel == 0:
            return torch.empty(part.size, dtype=file.get_tensor(piece.key).dtype)
        if part == piece.box:
            return file.get_tensor(piece.key)
        within = part.within(piece.box)
        if isinstance(file, EncryptedTensors):
            rows, *columns = within
            return file.rows(piece.key, rows.start, rows.stop)[(slice(None), *columns)]
        return file.get_slice(piece.key)[within]

    def _file(self, path: Path) -> Any:
        """Return the open file: an EncryptedTensors if it is encrypted, else the handle of the package safetensors."""
        if path not in self._files:
            with open(path, "rb") as file:
                encrypted = is_encrypted(file.read(8))
            self._files[path] = EncryptedTensors(path, self._key) if encrypted else safe_open(path, framework="pt")
        return self._files[path]


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank's part of a checkpoint."""

    tensors: dict[str, torch.Tensor]  # by name in the file, on the CPU
    record: dict[str, Any]  # JSON, includes the index

    def write(self, folder: Path, rank: int, retry: RetryPolicy = NO_RETRIES, key: FileKey | None = None) -> dict[str, str]:
        """Write the shards, wait until they are on the disk, and return the SHA-256 of each file by its name.

        key: encrypts the files; None writes them plain. Raises StorageError if writing fails until `retry` ends; this rank's
        files are then removed.
        """
        weights = folder / f"train-rank{rank:05d}.safetensors"
        index = weights.with_suffix(".json")

        def write() -> dict[str, str]:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                record = json.dumps(self.record).encode()
                return {weights.name: write_tensors(self.tensors, weights, key), index.name: write_bytes(index, record, key)}
            except OSError:  # the partial file may be what fills the disk
                for path in (weights, index):
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                raise

        size = sum(tensor.nbytes for tensor in self.tensors.values())
        return retrying(write, f"writing rank {rank}'s {size / 1e6:,.1f} MB of a checkpoint", weights, retry, size)


def collect_shards(entries: Iterable[Entry], record: dict[str, Any], copy: bool = False) -> Shards:
    """Return this rank's entries and `record` (JSON) as shards. `record["ranks"]` is the number of ranks that write.

    copy: copy the tensors into new memory, so that training can continue before the shards are written.
    """
    tensors: dict[str, torch.Tensor] = {}
    index = {}
    boxes: set[tuple[str, Box]] = set()
    for name, shape, box, tensor in entries:
        if tuple(tensor.shape) != box.size:
            raise AssertionError(f"'{name}': a tensor of shape {tuple(tensor.shape)} is not {box}")
        if (name, box) in boxes:
            raise AssertionError(f"'{name}': {box} occurs twice")
        boxes.add((name, box))
        key = name if name not in index else f"{name}@{','.join(map(str, box.offset))}"
        index[key] = {
            "name": name,
            "shape": list(shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "offset": list(box.offset),
            "size": list(box.size),
        }
        tensors[key] = tensor.detach().to("cpu", copy=copy).contiguous()
    return Shards(tensors, {**record, "tensors": index})


def read_shards(folder: Path, key: FileKey | None = None) -> tuple[BoxReader, list[dict[str, Any]]]:
    """Return (reader of all ranks' boxes, all ranks' records). key: decrypts encrypted files.

    Raises ValueError if a rank's file is missing, RecipeError if the files are encrypted with another key, or damaged.
    """
    records = [json.loads(read_bytes(path, key)) for path in sorted(folder.glob("train-rank*.json"))]
    if not records or len(records) != records[0]["ranks"]:
        expected = records[0]["ranks"] if records else "at least 1"
        raise ValueError(f"{folder}: got {len(records)} train-rank*.json files; expected {expected}")
    reader = BoxReader(key)
    for rank, record in enumerate(records):
        path = folder / f"train-rank{rank:05d}.safetensors"
        for stored, entry in record["tensors"].items():
            reader.add(entry["name"], entry["shape"], path, Box(tuple(entry["offset"]), tuple(entry["size"])), stored)
    return reader, records
