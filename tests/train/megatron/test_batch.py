"""Pad and cut a packed batch over context-parallel ranks, and put log-probs back in order."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pipeline.train.context_parallel import GatherContextParallel, localize, padded_lengths
from pipeline.train.megatron.local_modules import PackedAttention, PackedSequences, kernels_read_starts
from tests.train import cases, ranks
from tests.train.megatron import heads, layouts
from tests.train.megatron.layouts import CP2, Layout

ALL = list(range(len(cases.LENGTHS)))


@pytest.mark.parametrize(
    ("lengths", "ranks", "multiple", "expected"),
    [
        ((5, 1, 3), 1, 1, (5, 1, 3)),  # neither kind of parallelism: as it is
        ((5, 1, 3), 1, 4, (5, 1, 6)),  # sequence parallelism: the last until 4 divides the sum
        ((5, 1, 4), 1, 2, (5, 1, 4)),
        ((5, 1, 3), 2, 1, (8, 4, 4)),  # context parallelism: each to a multiple of 2 x 2
        ((1,), 4, 1, (8,)),
        ((1,), 2, 4, (8,)),  # both: 4 must divide each rank's half
        ((5, 1), 2, 3, (8, 4)),
        ((5, 3), 2, 3, (8, 4)),
        ((5, 5), 2, 3, (8, 16)),
    ],
)
def test_padded_lengths(lengths, ranks, multiple, expected):
    assert padded_lengths(lengths, ranks, multiple) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("chosen", [ALL, [2], [6], [0, 3], [2, 7, 2]], ids=str)
def test_every_token_is_on_one_rank(ranks, multiple, chosen):
    batch = heads.pack(chosen)
    parts = [localize(batch, ranks, rank, multiple) for rank in range(ranks)]
    padded = padded_lengths(batch.lengths, ranks, multiple)
    for part in parts:
        assert part.packing.cu_seqlens.tolist() == [0, *torch.tensor(padded).cumsum(0).tolist()]
        assert part.packing.max_length == max(padded)
        assert part.tokens.shape == part.positions.shape == (1, sum(padded) // ranks)
        assert part.targets.shape == (sum(padded) // ranks,)
        assert part.tokens.size(1) % multiple == 0
        assert torch.equal(part.begins, batch.positions == 0)

    # In zigzag order: of every sequence's 2 x ranks chunks, each rank has one from the front and its mirror from the back.
    starts = torch.tensor([0, *padded]).cumsum(0).tolist()
    offsets = [0] * ranks
    for s, (length, start) in enumerate(zip(padded, starts, strict=False)):
        real = batch.tokens[batch.cu_seqlens[s] : batch.cu_seqlens[s + 1]]
        tokens = torch.cat([real, real.new_zeros(length - len(real))])
        for rank, part in enumerate(parts):
            chunks = tokens.chunk(2 * ranks) if ranks > 1 else [tokens]
            expected = torch.cat([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else tokens
            here = slice(offsets[rank], offsets[rank] + length // ranks)
            assert torch.equal(part.tokens[0, here], expected), (s, start)
            offsets[rank] += length // ranks

    # Row places[t] of all ranks' rows has token t itself.
    tokens = torch.cat([part.tokens[0] for part in parts])
    assert all(torch.equal(tokens[part.token_rows], batch.tokens) for part in parts)

    # Row order[t] of all ranks' rows has the token before t, and token t as its target, wherever t does not begin a sequence.
    every = {name: torch.cat([getattr(part, name).flatten() for part in parts]) for name in ("tokens", "positions", "targets")}
    inside = ~parts[0].begins
    rows = parts[0].predicting_rows[inside]
    assert torch.equal(every["targets"][rows], batch.tokens[inside])
    candidates = torch.cat([part.candidates for part in parts])
    assert torch.equal(candidates[rows], batch.teacher.tokens[inside])
    assert torch.equal(every["tokens"][rows], batch.tokens.roll(1)[inside])
    assert torch.equal(every["positions"][rows], batch.positions[inside] - 1)
    assert len(rows.unique()) == len(rows)
    assert all(torch.equal(part.predicting_rows, parts[0].predicting_rows) for part in parts)


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_megatrons_description_of_a_padded_batch(ranks, multiple):
    """Padding counts as tokens, so TransformerEngine need not compare the starts with others, for which it would wait."""
    batch = heads.pack([0, 2, 3])
    padded = padded_lengths(batch.lengths, ranks, multiple)
    assert (padded == batch.lengths) == (ranks == multiple == 1)
    packing = localize(batch, ranks, ranks - 1, multiple).packing
    for found in (PackedSequences.of(packing), PackedSequences.of(packing, on_host=True)):
        assert found.cu_seqlens_q_padded is None and found.cu_seqlens_kv_padded is None
        for starts in (found.cu_seqlens_q, found.cu_seqlens_kv):
            assert starts.tolist() == [0, *itertools.accumulate(padded)] and starts.dtype == torch.int32
        assert found.max_seqlen_q == found.max_seqlen_kv == packing.max_length == max(padded)
    assert PackedSequences.of(packing).cu_seqlens_q is packing.cu_seqlens


@pytest.mark.parametrize(("fused", "ours", "expected"), [(False, True, False), (True, True, True), (False, False, True)])
def test_kernels_that_read_starts(fused, ours, expected):
    attention = PackedAttention.__new__(PackedAttention) if ours else torch.nn.Identity()
    torch.nn.Module.__init__(attention)
    layer = torch.nn.ModuleDict({"core_attention": attention, "other": torch.nn.Identity()})
    stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    assert kernels_read_starts(stage, SimpleNamespace(apply_rope_fusion=fused)) == expected


def gather(layout: Layout, folder: Path) -> None:
    layouts.backend(cases.policy(folder / "llama"), layout)
    group = parallel_state.get_context_parallel_group()
    rank = dist.get_rank()
    local = torch.arange(3.0).add(10 * rank).requires_grad_()
    whole = GatherContextParallel.apply(local, group)
    assert whole.tolist() == [0, 1, 2, 10, 11, 12]
    # Every rank has the same loss of the whole; the sum over ranks of what each takes back counts every entry once.
    (whole * torch.arange(6.0)).sum().backward()
    assert local.grad.tolist() == ([0, 1, 2] if rank == 0 else [3, 4, 5])


def test_gather_gives_each_rank_its_own_gradient(models):
    ranks.run(gather, CP2, models)
