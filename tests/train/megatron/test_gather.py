"""Gather Hugging Face tensors on rank 0 from the boxes of ranks. Layouts of several ranks: `test_parity.py`."""

import pytest
import torch
import torch.distributed as dist

from pipeline.boxes import Box, Piece
from pipeline.train.megatron.served_weights import WeightGatherer

SHAPES = {"b": (3, 2), "a": (4,)}


def gatherer(local):
    return WeightGatherer(local, SHAPES, dist.group.WORLD, torch.device("cpu"))


def fused(rows: int = 3) -> tuple[torch.Tensor, list[Piece]]:
    """Return a local tensor [2, 5]: `a` in its first row, and rows of `b` in its second one, the last one first."""
    tensor = torch.arange(10.0).view(2, 5)
    pieces = [Piece("a", Box((0,), (4,)), Box((0, 0), (1, 4))), Piece("b", Box((2, 0), (1, 2)), Box((1, 0), (1, 2)))]
    return tensor, [*pieces, Piece("b", Box((1, 0), (1, 2)), Box((1, 2), (1, 2)))][:rows]


def test_tensors_are_complete_ordered_and_in_the_requested_dtype(realm):
    first = (torch.tensor([[20.0, 21.0]]), [Piece("b", Box((0, 0), (1, 2)), Box((0, 0), (1, 2)))])
    found = gatherer([fused(), first])
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [(name, tensor.clone()) for name, tensor in found.tensors(dtype)]
        assert [name for name, _ in tensors] == ["b", "a"]
        assert all(tensor.dtype == dtype for _, tensor in tensors)
        assert dict(tensors)["a"].tolist() == [0, 1, 2, 3]
        assert dict(tensors)["b"].tolist() == [[20, 21], [7, 8], [5, 6]]


def test_an_incomplete_tensor_is_an_error(realm):
    with pytest.raises(ValueError, match=r"boxes of b \[3, 2\] do not cover the tensor"):
        gatherer([fused(2)])
