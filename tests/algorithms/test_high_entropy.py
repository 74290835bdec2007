"""The tokens of the highest entropy keep their advantages: those that reach torch's quantile of all counted tokens."""

import dataclasses
import math

import pytest
import torch

from pipeline.algorithms.token_advantages import keep_high_entropy
from tests.algorithms.sampled import random_sampled


def update(kinds: int) -> list:
    """Return microbatches with entropies of this many kinds, and advantages that are not 0."""
    draw, made = torch.Generator().manual_seed(kinds), []
    for seed, lengths in enumerate(((5, 3), (2, 7, 4), (9, 6))):
        batch = random_sampled(seed, lengths=lengths).batch
        entropy = torch.randint(0, kinds, (sum(lengths),), generator=draw) / 64
        made.append(dataclasses.replace(batch, old_entropy=entropy, advantages=batch.advantages + 9))
    return made


@pytest.mark.parametrize("kinds", [1, 4, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5, 0.7, 0.95])
def test_tokens_that_reach_the_quantile_are_kept(kinds: int, share: float):
    batches = update(kinds)
    threshold = torch.quantile(torch.cat([batch.old_entropy[batch.loss_mask] for batch in batches]), 1 - share)
    kept, lowest = keep_high_entropy(batches, share, int)
    entropies = torch.cat([batch.old_entropy[batch.loss_mask] for batch in batches])
    assert lowest == entropies[entropies >= threshold].min()
    assert len(kept) == len(batches) and any((batch.advantages != 0).any() for batch in kept)
    for before, after in zip(batches, kept, strict=True):
        expected = torch.where(before.old_entropy >= threshold, before.advantages, 0.0)
        assert torch.equal(after.advantages[before.loss_mask], expected[before.loss_mask])
        assert torch.equal(after.loss_mask, before.loss_mask)


def test_counts_are_of_all_ranks():
    """With twice the tokens on two ranks that are alike, the quantile is the same."""
    one, two = (keep_high_entropy(update(1000), 0.5, lambda count, ranks=ranks: ranks * count)[0] for ranks in (1, 2))
    shares = [sum(int((batch.advantages != 0).sum()) for batch in batches) for batches in (one, two)]
    assert abs(shares[0] - shares[1]) <= 1


def test_an_update_without_counted_tokens_is_left_alone():
    batches = [dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in update(4)]
    kept, lowest = keep_high_entropy(batches, 0.2, int)
    assert math.isnan(lowest) and len(kept) == 3 and kept[0] is batches[0] and kept[2] is batches[2]
