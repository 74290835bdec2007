"""Advantages standardized over a step equal those in one tensor, for every split over ranks and microbatches."""

import dataclasses

import pytest
import torch

from pipeline.algorithms.token_advantages import moments, normalization, standardize
from pipeline.types import GlobalCounts
from tests.algorithms.sampled import random_sampled


@pytest.fixture
def ranks():
    """Return [data rank][update][microbatch] batches with advantages far from 0, where a naive variance would be wrong."""
    made, seed = [], 0
    for _ in range(2):
        made.append([])
        for _ in range(3):
            made[-1].append([])
            for lengths in ((5, 3), (2, 7, 4)):
                batch = random_sampled(seed, lengths=lengths).batch
                values = batch.advantages * 3 + 40
                made[-1][-1].append(dataclasses.replace(batch, advantages=values, loss_mask=batch.positions > 0))
                seed += 1
    return made


def found(ranks, variance="biased"):
    return normalization([[moments(update) for update in rank] for rank in ranks], variance)


@pytest.mark.parametrize(("variance", "correction"), [("biased", 0), ("unbiased", 1)])
def test_equals_the_whole_step_in_one_tensor(ranks, variance, correction):
    batches = [batch for rank in ranks for update in rank for batch in update]
    whole = torch.cat([batch.advantages[batch.loss_mask] for batch in batches])
    to = found(ranks, variance)
    after = torch.cat([standardize(batch, to).advantages[batch.loss_mask] for batch in batches])
    torch.testing.assert_close(after, (whole - whole.mean()) / whole.var(correction=correction).sqrt(), rtol=1e-8, atol=1e-8)
    assert abs(after.mean()) < 1e-9 and after.var(correction=correction).item() == pytest.approx(1)


def test_the_spread_over_ranks_and_microbatches_does_not_matter(ranks):
    elsewhere = [[[batch for rank in ranks for batch in rank[update]] for update in range(3)]]
    one, other = found(ranks), found(elsewhere)
    assert one.counts == other.counts
    assert one.mean == pytest.approx(other.mean, rel=1e-14) and one.scale == pytest.approx(other.scale, rel=1e-10)


def test_counts_follow_the_current_masks(ranks):
    first = ranks[0][0][0]
    ranks[0][0][0] = dataclasses.replace(first, loss_mask=first.loss_mask & (torch.arange(8) >= 5))  # one of its two is out
    assert found(ranks).counts[0] == GlobalCounts(tokens=2 * (4 + 2 + 1 + 6 + 3) - 4, sequences=9)


def test_without_standardizing_only_uncounted_entries_change(ranks):
    batch = ranks[0][0][0]
    after = standardize(batch, found(ranks, None)).advantages
    assert torch.equal(after, torch.where(batch.loss_mask, batch.advantages, 0.0))


@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_equal_advantages_become_zero(ranks, variance):
    flat = [[[dataclasses.replace(b, advantages=torch.full_like(b.advantages, 0.3)) for b in u] for u in r] for r in ranks]
    assert standardize(flat[0][0][0], found(flat, variance)).advantages.abs().max() < 1e-9
