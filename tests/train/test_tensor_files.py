"""Tensors in files are as the package safetensors reads them, and stay as they are."""

import hashlib
import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from pipeline.train.tensor_files import DTYPES, write_tensors


def test_the_package_reads_every_dtype(tmp_path):
    tensors = {name: torch.arange(12).reshape(3, 4).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "transposed": torch.arange(6.0).reshape(2, 3).T}
    write_tensors(tensors, tmp_path / "model.safetensors")
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].float(), tensor.float())


def test_the_bytes_of_a_file(tmp_path):
    tensors = {"b": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0, 2), "a": torch.tensor(0.5).double()}
    digest = write_tensors(tensors, tmp_path / "given")
    given = (tmp_path / "given").read_bytes()
    assert hashlib.sha256(given).hexdigest() == digest
    entries = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
        "none": {"dtype": "F32", "shape": [0, 2], "data_offsets": [8, 8]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    assert given == len(header).to_bytes(8, "little") + header + struct.pack("<d", 0.5) + b"\x80\x3f" * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_can_be_resized_afterwards(tmp_path, dtype):
    """Offloading frees it that way."""
    tensor = torch.ones(8, dtype=dtype)
    write_tensors({"weight": tensor}, tmp_path / "model.safetensors")
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
