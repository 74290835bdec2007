"""Compare log-probs, entropy and most likely tokens, in chunks and over ranks, with plain formulas in float64."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.train.heads import packed_outputs
from pipeline.train.logprobs import LINEAR, HeadFunction, VocabularyShard, most_likely, target_outputs
from pipeline.types import Outputs, TopK
from tests.train import cases, ranks

LENGTHS = (7, 1, 12, 3)
TOKENS, HIDDEN, VOCABULARY, CANDIDATES = sum(LENGTHS), 8, 37, 5


@dataclasses.dataclass
class Inputs:
    """The inputs of a head, and the weights of all its outputs in a loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    candidates: torch.Tensor
    of_logprobs: torch.Tensor
    of_entropy: torch.Tensor
    of_candidates: torch.Tensor

    def total(self, outputs: Outputs) -> torch.Tensor:
        total = (outputs.logprobs * self.of_logprobs).sum()
        if outputs.entropy is not None:
            total = total + (outputs.entropy * self.of_entropy).sum()
        if outputs.top_k is not None:
            total = total + (outputs.top_k.logprobs * self.of_candidates).sum()
        return total

    def gradients(self, outputs: Outputs) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.total(outputs), (self.hidden, self.weight))


def inputs(dtype=torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = 3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return Inputs(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        torch.cat([torch.arange(length) for length in LENGTHS]),
        torch.randint(0, VOCABULARY, (TOKENS, CANDIDATES), generator=generator),  # a token may come twice
        torch.randn(TOKENS, generator=generator),
        torch.randn(TOKENS, generator=generator),
        torch.randn(TOKENS, CANDIDATES, generator=generator),
    )


def ours(given: Inputs, temperature, chunk: int | None, shard=None, weight=None, everything=True, function=LINEAR) -> Outputs:
    weight = given.weight if weight is None else weight
    batch = cases.localized(given.tokens, given.positions, given.candidates if everything else None)
    return packed_outputs(given.hidden, weight, batch, temperature, chunk, shard, entropy=everything, function=function)


def applied(function: HeadFunction, products: torch.Tensor) -> torch.Tensor:
    """Return what the function computes, with a graph."""
    products = products * function.scale
    return products if function.softcap is None else function.softcap * (products / function.softcap).tanh()


def plain(given: Inputs, temperature: float, function: HeadFunction = LINEAR) -> Outputs:
    """Compute the outputs by autograd through the whole table of log-probs, in float64."""
    table = (applied(function, given.hidden @ given.weight.T) / temperature).log_softmax(-1).roll(1, 0)
    seen = (given.positions != 0).double()
    return Outputs(
        logprobs=table.gather(1, given.tokens[:, None])[:, 0] * seen,
        entropy=-(table.exp() * table).sum(1) * seen,
        top_k=TopK(given.candidates, table.gather(1, given.candidates) * seen[:, None]),
    )


def check(found: Outputs, given: Inputs, gradients: tuple[torch.Tensor, ...], temperature: float, function=LINEAR) -> None:
    exact = inputs()
    expected = plain(exact, temperature, function)
    pairs = [
        (found.logprobs, expected.logprobs),
        (found.entropy, expected.entropy),
        (found.top_k.logprobs, expected.top_k.logprobs),
    ]
    for value, theirs in pairs:
        assert value.dtype == torch.float32 and value.shape == theirs.shape
        assert (value - theirs).abs().max() < 2e-5
        assert value[given.positions == 0].eq(0).all()
    begins = (given.positions == 0)[:, None]
    assert torch.equal(found.top_k.tokens, given.candidates.masked_fill(begins, 0))
    for gradient, theirs in zip(gradients, exact.gradients(expected), strict=True):
        assert (gradient - theirs).abs().max() < 2e-6 * theirs.abs().max()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, TOKENS - 1, TOKENS, None])
def test_values_and_gradients(chunk, temperature):
    given = inputs(torch.float32)
    found = ours(given, temperature, chunk)
    check(found, given, given.gradients(found), temperature)


FUNCTIONS = [HeadFunction(0.3), HeadFunction(softcap=15.0), HeadFunction(0.5, 8.0)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("chunk", [5, None])
def test_scales_and_soft_caps(chunk, function):
    given = inputs(torch.float32)
    found = ours(given, 0.6, chunk, function=function)
    check(found, given, given.gradients(found), 0.6, function)
    assert (found.logprobs - plain(inputs(), 0.6).logprobs).abs().max() > 0.5  # the function matters
    logits = applied(function, given.hidden.detach().double() @ given.weight.detach().double().T) / 0.6
    tokens, logprobs = most_likely(given.hidden, given.weight, 4, 0.6, chunk, function=function)
    assert (logprobs - logits.log_softmax(-1).gather(1, tokens)).abs().max() < 1e-4
    assert (logprobs - logits.log_softmax(-1).topk(4, 1).values).abs().max() < 1e-4


@pytest.mark.parametrize("part", ["logprobs", "entropy", "top_k"])
@pytest.mark.parametrize("chunk", [5, None])
def test_each_output_has_its_own_gradient(chunk, part):
    def only(given: Inputs, outputs: Outputs) -> torch.Tensor:
        return {
            "logprobs": lambda: outputs.logprobs * given.of_logprobs,
            "entropy": lambda: outputs.entropy * given.of_entropy,
            "top_k": lambda: outputs.top_k.logprobs * given.of_candidates,
        }[part]().sum()

    given, exact = inputs(torch.float32), inputs()
    found = torch.autograd.grad(only(given, ours(given, 0.6, chunk)), (given.hidden, given.weight))
    expected = torch.autograd.grad(only(exact, plain(exact, 0.6)), (exact.hidden, exact.weight))
    assert len(found) == len(expected) == 2
    for gradient, theirs in zip(found, expected, strict=True):
        assert (gradient - theirs).abs().max() < 2e-6 * theirs.abs().max()


@pytest.mark.parametrize("chunk", [5, None])
def test_without_entropy_and_candidates(chunk):
    given = inputs(torch.float32)
    everything, bare = ours(given, 0.6, chunk), ours(given, 0.6, chunk, everything=False)
    assert bare.entropy is None and bare.top_k is None and bare.values is None
    assert torch.equal(bare.logprobs, everything.logprobs)


def test_a_certain_distribution_has_no_entropy_and_a_finite_gradient():
    """The logits are so far apart that the other probabilities underflow."""
    hidden, weight = torch.ones(2, 1, requires_grad=True), torch.tensor([[0.0], [-500.0], [-1000.0]], requires_grad=True)
    entropy = target_outputs(hidden, weight, torch.tensor([0, 2]), 1.0, None, entropy=True).entropy
    assert entropy.tolist() == [0.0, 0.0]
    entropy.sum().backward()
    assert hidden.grad.eq(0).all() and weight.grad.eq(0).all()


@pytest.mark.parametrize("chunk", [5, None])
def test_bfloat16_gradients_are_rounded_once(chunk):
    given = inputs(torch.bfloat16)
    found = ours(given, 1.0, chunk)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    exact = inputs()
    exact.hidden, exact.weight = (t.detach().double().requires_grad_() for t in (given.hidden, given.weight))
    for gradient, theirs in zip(given.gradients(found), exact.gradients(plain(exact, 1.0)), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - theirs).abs().max() < 0.03 * theirs.abs().max()


@pytest.mark.parametrize("chunk", [4, None])
def test_the_graph_can_be_used_twice(chunk):
    given = inputs(torch.float32)
    total = given.total(ours(given, 1.0, chunk))
    first = torch.autograd.grad(total, (given.hidden, given.weight), retain_graph=True)
    second = torch.autograd.grad(total, (given.hidden, given.weight))
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- the most likely tokens -------------------------------------------------------------------------------------------------


def tied_inputs() -> Inputs:
    """Return small whole numbers, so that many logits are exactly equal."""
    given = inputs(torch.float32)
    given.hidden, given.weight = (t.detach().mul(0.7).round() for t in (given.hidden, given.weight))
    return given


def expected_most_likely(given: Inputs, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stable sort of all log-probs: of equal ones the lower token comes first."""
    table = (given.hidden.double() @ given.weight.double().T / temperature).log_softmax(-1)
    order = table.sort(dim=1, descending=True, stable=True)
    return order.indices[:, :k], order.values[:, :k]


@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("make", [tied_inputs, lambda: inputs(torch.float32)], ids=["ties", "no ties"])
def test_most_likely(make, chunk, k):
    given = make()
    tokens, logprobs = most_likely(given.hidden, given.weight, k, 0.5, chunk)
    expected_tokens, expected = expected_most_likely(given, k, 0.5)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32 and not logprobs.requires_grad
    assert torch.equal(tokens, expected_tokens)
    assert (logprobs - expected).abs().max() < 1e-4


def test_most_likely_of_packed_tokens():
    given = tied_inputs()
    found = packed_outputs(given.hidden, given.weight, cases.localized(given.tokens, given.positions), 0.5, 5, top_k=4)
    tokens, logprobs = (t.roll(1, 0) for t in most_likely(given.hidden, given.weight, 4, 0.5, 5))
    begins = given.positions == 0
    assert found.top_k.tokens[begins].eq(0).all() and found.top_k.logprobs[begins].eq(0).all()
    assert torch.equal(found.top_k.tokens[~begins], tokens[~begins])
    assert torch.equal(found.top_k.logprobs[~begins], logprobs[~begins])


def test_zeros_of_both_signs_are_equally_likely():
    """A logit that underflows is -0."""
    hidden, weight, temperature = torch.ones(1, 1), torch.tensor([[-2e-38], [0.0], [-1e12]]), 1e10
    assert (hidden @ weight.T / temperature).signbit().tolist() == [[True, False, True]]
    assert most_likely(hidden, weight, 2, temperature, None)[0].tolist() == [[0, 1]]


def test_more_than_the_vocabulary_is_refused():
    given = tied_inputs()
    with pytest.raises(ValueError, match=f"top_k: got {VOCABULARY + 1}; expected 1 to {VOCABULARY}"):
        most_likely(given.hidden, given.weight, VOCABULARY + 1, 1.0, None)


# ---- over ranks, and in memory ----------------------------------------------------------------------------------------------


def over_ranks(layout: ranks.Layout, folder: Path) -> None:
    """Check unequal parts of the vocabulary; the last one has fewer tokens than requested."""
    group = dist.group.WORLD
    start, stop = [(0, 20), (20, 34), (34, VOCABULARY)][dist.get_rank()]
    shard = VocabularyShard(start, group)
    for chunk in (5, None):
        given = inputs(torch.float32)
        rows = given.weight.detach()[start:stop].requires_grad_()
        found = ours(given, 0.6, chunk, shard, rows, function=FUNCTIONS[-1])
        of_hidden, of_rows = torch.autograd.grad(given.total(found), (given.hidden, rows))
        of_weight = torch.zeros_like(given.weight)
        of_weight[start:stop] = of_rows
        dist.all_reduce(of_weight)
        check(found, given, (of_hidden, of_weight), 0.6, FUNCTIONS[-1])
        for k in (4, VOCABULARY):
            given = tied_inputs()
            tokens, logprobs = most_likely(given.hidden, given.weight[start:stop], k, 0.5, chunk, shard)
            expected_tokens, expected = expected_most_likely(given, k, 0.5)
            assert torch.equal(tokens, expected_tokens)
            assert (logprobs - expected).abs().max() < 1e-4


def test_the_vocabulary_over_ranks(tmp_path):
    ranks.run(over_ranks, ranks.Layout(1, 3), tmp_path)


class Sizes(TorchDispatchMode):
    """Records the size of the largest tensor, and the number of tensors as large as `counted`."""

    def __init__(self, counted: int = 0):
        super().__init__()
        self.largest, self.counted, self.count = 0, counted, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.count += tensor.numel() == self.counted
        return result


@pytest.mark.parametrize("everything", [False, True])
def test_no_tensor_has_all_tokens_and_the_whole_vocabulary(everything):
    seen = {}
    for chunk in (4, None):
        given = inputs(torch.float32)
        with Sizes() as sizes:
            given.total(ours(given, 1.0, chunk, everything=everything)).backward()
            most_likely(given.hidden, given.weight, 4, 1.0, chunk)
        seen[chunk] = sizes.largest
    assert seen[4] == VOCABULARY * HIDDEN  # the head itself, and its gradient
    assert seen[None] == TOKENS * VOCABULARY


def test_plain_log_probs_make_the_minimum_of_passes_over_the_logits():
    """Count for one chunk: the product, and softmax in two steps in place; backward: the gradient made, added to,
    transposed.
    """
    given = inputs(torch.float32)
    with Sizes(TOKENS * VOCABULARY) as sizes:
        given.total(ours(given, 1.0, None, everything=False)).backward()
    assert sizes.count == 6
