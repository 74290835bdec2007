"""Advantages of mean 0 and variance 1 over all counted tokens of a step, however those are spread over ranks and microbatches.

    biased      A <- (A - mean) / sqrt(max(sum (A - mean)^2 / n, 1e-8))          NeMo-RL's REINFORCE++
    unbiased    A <- (A - mean) / sqrt(sum (A - mean)^2 / (n - 1) + 1e-8)        NeMo-RL's and verl's GAE

n is the number of those tokens. Each data rank sums up its own tokens in float64, rank 0
adds the sums up and tells all ranks what to subtract and multiply by. The counts go along: `estimate` may have cleared a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pipeline.algorithms.base import Variance
from pipeline.types import GlobalCounts, Moments, PackedBatch, Standard

EPSILON = 1e-8


def moments(batches: Sequence[PackedBatch]) -> Moments:
    """Of the microbatches of one update on one data rank."""
    counted = torch.cat([batch.advantages[batch.loss_mask] for batch in batches]).double()
    sequences = sum(int(mask.any()) for batch in batches for mask in batch.loss_mask.split(batch.lengths))
    return Moments(counted.sum().item(), counted.square().sum().item(), GlobalCounts(len(counted), sequences))


def standard(of_ranks: Sequence[Sequence[Moments]], variance: Variance | None) -> Standard:
    """of_ranks[data rank][update]. With `variance` None, advantages stay and only the counts are new."""
    updates = [list(of_update) for of_update in zip(*of_ranks, strict=True)]
    counts = [GlobalCounts(sum(m.counts.tokens for m in update), sum(m.counts.sequences for m in update)) for update in updates]
    if variance is None:
        return Standard(0.0, 1.0, counts)
    everything = [m for update in updates for m in update]
    tokens = max(1, sum(m.counts.tokens for m in everything))
    mean = sum(m.sum for m in everything) / tokens
    biased = max(0.0, sum(m.squares for m in everything) / tokens - mean * mean)
    if variance == "biased":
        return Standard(mean, max(biased, EPSILON) ** -0.5, counts)
    return Standard(mean, (biased * tokens / max(1, tokens - 1) + EPSILON) ** -0.5, counts)


def standardize(batch: PackedBatch, to: Standard) -> PackedBatch:
    """Entries that do not count become 0."""
    advantages = torch.where(batch.loss_mask, (batch.advantages - to.mean) * to.scale, 0.0)
    return dataclasses.replace(batch, advantages=advantages)
