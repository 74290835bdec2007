"""Read and write safetensors files one tensor at a time.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes one after another
(https://github.com/huggingface/safetensors, "Format"). The safetensors package needs all tensors in memory to write, and reads
through a memory map, whose pages count as memory of the process. Here memory is bounded by one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.files.storage import sync
from pipeline.models import weight_files
from pipeline.train.tensor_files import DTYPES, bytes_of, header_of


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
    """Return {name: StoredTensor} of a file. Raises ValueError if it is truncated or a dtype is not floating-point."""
    try:
        return readable_tensors(weight_files.read_header(path).items())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def readable_tensors(tensors: Iterable[tuple[str, weight_files.TensorEntry]]) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor}, from which tensors are loaded. Raises ValueError if a dtype is not floating-point."""
    readable = {}
    for name, stored in tensors:
        if stored.dtype not in weight_files.FLOATS:
            raise ValueError(f"{name} has dtype {stored.dtype}; expected {', '.join(weight_files.FLOATS)}. Is it quantized?")
        readable[name] = StoredTensor(stored.path, DTYPES[stored.dtype], stored.shape, stored.start, stored.nbytes)
    return readable


def stream_tensors(path: Path, tensors: Mapping[str, torch.Tensor], make: Callable[[str], torch.Tensor]) -> None:
    """Write `make(name)` for every name of `tensors`, one at a time, and wait until the file is on the disk.

    tensors: {name: a tensor with the shape and dtype}; may be meta tensors.
    """
    header, names = header_of(tensors)
    with open(path, "wb") as file:
        file.write(header)
        for name in names:
            tensor = make(name).contiguous()
            if (tensor.dtype, tensor.shape) != (tensors[name].dtype, tensors[name].shape):
                raise AssertionError(
                    f"{name} is {tensor.dtype} {tensor.shape}, not {tensors[name].dtype} {tensors[name].shape}"
                )
            file.write(bytes_of(tensor))
            del tensor  # before the next one is made
    sync(path)
