"""Read and write safetensors files one tensor at a time.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, "Format"). The safetensors package needs all tensors in memory to write, and reads
through a memory map, whose pages count as memory of the process. Here memory is bounded by one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.storage import sync
from pipeline.train.tensor_files import bytes_of, header_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's position in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int

    def empty(self) -> torch.Tensor:
        """Return a meta tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def load(self) -> torch.Tensor:
        """Read the tensor. Raises ValueError if the file is too short."""
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            if file.readinto(data.numpy().data) != self.nbytes:
                raise ValueError(f"{self.path}: the file is truncated")
        return data.view(self.dtype).view(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file from its header. Raises ValueError if it is truncated or a dtype is not floating-point."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
    if header is None:
        raise ValueError(f"{path}: not a safetensors file, or truncated")
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name}: got dtype {entry['dtype']}; expected {', '.join(_DTYPES)}. Is it quantised?")
        if 8 + length + end > size:
            raise ValueError(f"{path}: the file is truncated: {name} ends at byte {8 + length + end} of {size}")
        found[name] = StoredTensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return found


def stream_tensors(path: Path, tensors: Mapping[str, torch.Tensor], make: Callable[[str], torch.Tensor]) -> None:
    """Write `make(name)` for every name of `tensors`, one at a time, and wait until the file is on the disk.

    tensors: shapes and dtypes; may be meta tensors.
    """
    header, names = header_of(tensors)
    with open(path, "wb") as file:
        file.write(header)
        for name in names:
            made = make(name).contiguous()
            if (made.dtype, made.shape) != (tensors[name].dtype, tensors[name].shape):
                raise AssertionError(f"{name} is {made.dtype} {made.shape}, not {tensors[name].dtype} {tensors[name].shape}")
            file.write(bytes_of(made))
            del made  # before the next one is made
    sync(path)
