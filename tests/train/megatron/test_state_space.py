"""Compare Mamba-2 over packed sequences with transformers' functions, which take one sequence at a time."""

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h as theirs

from pipeline.train.megatron.mixer import convolve, token_positions
from pipeline.train.megatron.state_space import scan
from pipeline.train.sequence_bounds import Packing

LENGTHS = (5, 5, 1, 9, 3, 3, 12, 2)
HEADS, WIDTH, GROUPS, STATE, CHUNK = 6, 4, 2, 5, 4


def packing() -> Packing:
    return Packing.of_lengths(LENGTHS, torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32))


def inputs() -> tuple[torch.Tensor, ...]:
    """Return (x, step, a, b, c, d), random."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(tokens, HEADS, WIDTH), (tokens, HEADS), (HEADS,), (tokens, GROUPS, STATE), (tokens, GROUPS, STATE), (HEADS,)]
    x, step, a, b, c, d = (torch.randn(shape) for shape in shapes)
    return tuple(tensor.requires_grad_() for tensor in (x, step.exp(), -a.exp(), b, c, d))


def by_sequence(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part[None] for part in tensor.split(LENGTHS)]


@pytest.mark.parametrize("chunk", [1, CHUNK, 64])
def test_the_scan_and_its_gradients_equal_transformers(chunk):
    ours = [tensor.detach().requires_grad_() for tensor in inputs()]
    reference = [tensor.detach().requires_grad_() for tensor in inputs()]
    x, step, a, b, c, d = reference
    sequences = zip(*map(by_sequence, (x, step, b, c)), strict=True)
    expected = torch.cat([theirs.mamba2_chunk_scan(xs, ss, a, bs, cs, CHUNK, D=d)[0] for xs, ss, bs, cs in sequences])
    found = scan(*ours, packing(), chunk)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_the_state_starts_anew_at_each_sequence():
    """A scan over all tokens as one sequence is another function, so the comparison above would notice it."""
    whole = Packing.of_lengths((sum(LENGTHS),), torch.tensor([0, sum(LENGTHS)], dtype=torch.int32))
    assert (scan(*inputs(), packing(), CHUNK) - scan(*inputs(), whole, CHUNK)).abs().max() > 0.1


def convolution() -> tuple[torch.Tensor, ...]:
    """Return (x, weight, bias), random."""
    torch.manual_seed(1)
    return torch.randn(sum(LENGTHS), 7), torch.randn(7, 4), torch.randn(7)


@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_and_its_gradients_equal_transformers(biased):
    ours, reference = ([tensor.requires_grad_() for tensor in convolution()] for _ in range(2))
    x, weight, bias = reference
    rows = [
        theirs.causal_conv1d_fn(part.mT, weight, bias if biased else None, activation="silu")[0].mT for part in by_sequence(x)
    ]
    found = convolve(*ours[:2], ours[2] if biased else None, token_positions(packing()))
    torch.testing.assert_close(found, torch.cat(rows))
    weights = torch.randn_like(found)
    for output in (found, torch.cat(rows)):
        (output * weights).sum().backward()
    for mine, other in zip(ours[: 2 + biased], reference, strict=False):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_fewer_tokens_than_taps():
    x, weight, bias = (tensor.double().requires_grad_() for tensor in convolution())
    positions = torch.arange(2)
    assert torch.autograd.gradcheck(lambda *tensors: convolve(*tensors, positions), (x[:2], weight, bias))


def test_a_convolution_in_half_precision_rounds_once():
    x, weight, bias = (tensor.bfloat16() for tensor in convolution())
    positions = token_positions(packing())
    exact = convolve(x.double(), weight.double(), bias.double(), positions)
    assert torch.equal(convolve(x, weight, bias, positions), exact.bfloat16())
