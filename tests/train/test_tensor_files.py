"""Tensors in files are as the package safetensors reads them, and stay as they are."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storage_can_be_resized_afterwards(tmp_path, dtype):
    """Offloading frees it that way."""
    tensor = torch.ones(8, dtype=dtype)
    write_tensors({"weight": tensor}, tmp_path / "model.safetensors")
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
