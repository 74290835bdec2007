"""Chunked log-probs against the plain formula, with their gradients; how much memory they touch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train.logprobs import token_logprobs

LENGTHS = (7, 1, 12, 3)
TOKENS, HIDDEN, VOCABULARY = sum(LENGTHS), 8, 37


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    factors = torch.randn(TOKENS, generator=generator)
    return hidden, weight, tokens, positions, factors


def plain(hidden, weight, tokens, positions, temperature):
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    expected = [torch.zeros(()) if positions[t] == 0 else logprobs[t - 1, tokens[t]] for t in range(len(tokens))]
    return torch.stack(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS - 1, TOKENS, None])
def test_values_and_gradients(chunk, temperature):
    hidden, weight, tokens, positions, factors = inputs(torch.float32)
    ours = token_logprobs(hidden, weight, tokens, positions, temperature, chunk)
    assert ours.dtype == torch.float32
    gradients = torch.autograd.grad((ours * factors).sum(), (hidden, weight))
    hidden, weight, *_ = inputs()
    theirs = plain(hidden, weight, tokens, positions, temperature)
    expected = torch.autograd.grad((theirs * factors).sum(), (hidden, weight))
    assert (ours - theirs).abs().max() < 1e-5
    assert ours[positions == 0].eq(0).all()
    for gradient, exact in zip(gradients, expected, strict=True):
        assert (gradient - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("chunk", [5, None])
def test_bfloat16_gradients_are_rounded_once(chunk):
    hidden, weight, tokens, positions, factors = inputs(torch.bfloat16)
    ours = token_logprobs(hidden, weight, tokens, positions, 1.0, chunk)
    assert ours.dtype == torch.float32
    gradients = torch.autograd.grad((ours * factors).sum(), (hidden, weight))
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    theirs = plain(*exact_inputs, tokens, positions, 1.0)
    expected = torch.autograd.grad((theirs * factors).sum(), exact_inputs)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("chunk", [4, None])
def test_the_graph_can_be_used_twice(chunk):
    hidden, weight, tokens, positions, factors = inputs(torch.float32)
    total = (token_logprobs(hidden, weight, tokens, positions, 1.0, chunk) * factors).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tensor_has_all_tokens_and_the_whole_vocabulary():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    seen = {}
    for chunk in (4, None):
        hidden, weight, tokens, positions, factors = inputs(torch.float32)
        with Largest() as largest:
            (token_logprobs(hidden, weight, tokens, positions, 1.0, chunk) * factors).sum().backward()
        seen[chunk] = largest.elements
    assert seen[4] == VOCABULARY * HIDDEN  # the head itself, and its gradient
    assert seen[None] == TOKENS * VOCABULARY
