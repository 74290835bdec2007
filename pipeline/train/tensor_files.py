"""Write safetensors files one tensor at a time, and read tensors of plain and of encrypted ones.

The package safetensors needs all tensors in memory to write, reads through a memory map, whose pages count as memory of the
process, and knows neither encryption nor a digest of what it writes.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.files.stored_files import DigestWriter, FileKey, open_encrypted

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, key: FileKey | None = None) -> str:
    """Write a safetensors file, wait until it is on the disk, and return its SHA-256 in hex. Raises OSError.

    tensors: {name: a tensor on the CPU}. key: encrypts the file; None writes it plain.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned to its dtype
    with DigestWriter(path, key) as file:
        file.write(_header(tensors, names))
        for name in names:
            tensor = tensors[name].contiguous()
            if tensor.numel():
                file.write(_bytes_of(tensor))
        return file.finish()


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> bytes:
    """Return all bytes of a file before the tensors' bytes. names: the order of the tensors' bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy. They are valid as long as the tensor lives.

    The function does not use `numpy`, after which torch could no longer resize the tensor's storage, as offloading does.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class EncryptedTensors:
    """The tensors of an encrypted safetensors file."""

    def __init__(self, path: Path, key: FileKey | None):
        """Raises RecipeError if the key is missing or is not the key of the file, or if the file is damaged."""
        self._file = open_encrypted(path, key)
        length = int.from_bytes(self._file.read(0, 8), "little")
        self._header = json.loads(self._file.read(8, length))
        self._begin = 8 + length

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return entries `begin` to `end`, excluded, of a tensor's first dimension. For a scalar, pass 0 and 1."""
        entry = self._header[name]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        row = math.prod(shape[1:]) * dtype.itemsize
        data = self._file.read(self._begin + entry["data_offsets"][0] + begin * row, (end - begin) * row)
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return values.view([end - begin, *shape[1:]] if shape else [])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        shape = self._header[name]["shape"]
        return self.rows(name, 0, shape[0] if shape else 1)
