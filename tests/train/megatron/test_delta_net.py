"""Compare the chunked gated delta rule over packed sequences with its recurrence in float64, token by token."""

import pytest
import torch

from pipeline.models.mixers import DeltaNet
from pipeline.train.megatron.delta_net import delta_rule
from pipeline.train.megatron.mixer import HeadShare
from pipeline.train.sequence_bounds import Packing

LENGTHS = (5, 5, 1, 9, 3, 3, 12, 2)
GROUPS, HEADS, KEY, VALUE, CHUNK = 2, 6, 5, 4, 4


def packing(lengths: tuple[int, ...] = LENGTHS) -> Packing:
    return Packing.of_lengths(lengths, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return [query, key, value, strength, decay], random."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = [(tokens, GROUPS, KEY), (tokens, GROUPS, KEY), (tokens, HEADS, VALUE), (tokens, HEADS), (tokens, HEADS)]
    query, key, value, strength, decay = (torch.randn(shape) for shape in shapes)
    return [tensor.to(dtype).requires_grad_() for tensor in (query, key, value, strength.sigmoid(), -decay.exp())]


def recurrence(query, key, value, strength, decay) -> torch.Tensor:
    """Return y [T, R, P] of one sequence."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (query, key))
    state, found = torch.zeros(HEADS, KEY, VALUE, dtype=value.dtype), []
    for q, k, v, b, g in zip(query, key, value, strength, decay, strict=True):
        state = g.exp()[:, None, None] * state
        change = b[:, None] * (v - torch.einsum("rnp,rn->rp", state, k))
        state = state + torch.einsum("rn,rp->rnp", k, change)
        found.append(torch.einsum("rnp,rn->rp", state, q) / KEY**0.5)
    return torch.stack(found)


@pytest.mark.parametrize("chunk", [1, CHUNK, 64])
def test_the_rule_and_its_gradients_equal_the_recurrence(chunk):
    ours, reference = inputs(), inputs(torch.float64)
    sequences = zip(*(tensor.split(LENGTHS) for tensor in reference), strict=True)
    expected = torch.cat([recurrence(*parts) for parts in sequences])
    found = delta_rule(*ours, packing(), chunk)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=2e-6)


def test_the_state_starts_anew_at_each_sequence():
    """The rule over all tokens as one sequence is another function, so the comparison above would notice it."""
    whole = packing((sum(LENGTHS),))
    assert (delta_rule(*inputs(), packing(), CHUNK) - delta_rule(*inputs(), whole, CHUNK)).abs().max() > 0.1


@pytest.mark.parametrize(("tensor", "ranks"), [(1, 2), (2, 2), (1, 4), (4, 1)])
def test_context_parallel_ranks_share_the_heads_and_what_their_groups_have(tensor, ranks):
    sizes = DeltaNet(4, 8, 3, 5, 4, 1e-6)
    shares = [HeadShare.of(sizes, tensor, ranks, rank, torch.device("cpu")) for rank in range(ranks)]
    heads, groups = 8 // tensor, 4 // tensor
    assert torch.cat([share.heads for share in shares]).tolist() == list(range(heads))
    for share in shares:
        mine = sorted({int(head) * groups // heads for head in share.heads})
        of_groups = [start + group * 3 + i for start in (0, groups * 3) for group in mine for i in range(3)]
        of_heads = [2 * groups * 3 + int(head) * 5 + i for head in share.heads for i in range(5)]
        assert share.channels.tolist() == [*of_groups, *of_heads] and share.groups == len(mine)
