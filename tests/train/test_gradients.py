"""The norm of gradients against exact sums."""

import math
from types import SimpleNamespace

import pytest
import torch

from pipeline.train.gradients import CHUNK, Gradients


def norm(*values: torch.Tensor) -> float:
    """Return the norm of gradients as a step of one rank computes it, before the sum over ranks."""
    parameters = {f"p{i}": torch.nn.Parameter(torch.zeros_like(value)) for i, value in enumerate(values)}
    for parameter, value in zip(parameters.values(), values, strict=True):
        parameter.grad = value
    group = SimpleNamespace(rank=lambda: 0)
    return math.sqrt(Gradients(parameters, {}, group, torch.device("cpu"))._squared_norm().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_summed_in_float64(dtype: torch.dtype):
    torch.manual_seed(0)
    drawn = torch.randn(70, 3001).to(dtype)
    assert norm(drawn, drawn[:3], drawn[:0]) == pytest.approx(
        math.sqrt(math.fsum(value**2 for part in (drawn, drawn[:3]) for value in part.flatten().tolist())), rel=1e-12
    )


def test_small_elements_count_beside_large_ones():
    """In float32, 2**24 + 1 is 2**24."""
    values = torch.ones(1_000_000)
    values[:4096] = 4096.0
    assert norm(values) == pytest.approx(math.sqrt(4096 * 4096.0**2 + 1_000_000 - 4096), rel=1e-12)
    assert norm(torch.full((2,), 1e30)) == pytest.approx(math.sqrt(2) * 1e30)


@pytest.mark.full
def test_the_norm_of_an_embedding():
    values = torch.full((7 * CHUNK + 5,), 0.1)
    assert norm(values) == pytest.approx(math.sqrt(values.numel()) * float(values[0]), rel=1e-10)
