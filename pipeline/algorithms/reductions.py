"""Compute sums, means and extremes over the counted tokens of packed sequences, those where `loss_mask` is True."""

from __future__ import annotations

import dataclasses

import torch

from pipeline.types import BIN_EDGES, BINS, GlobalCounts, PackedBatch


def masked_share(values: torch.Tensor, batch: PackedBatch, counts: GlobalCounts, token_level: bool = True) -> torch.Tensor:
    """Return this batch's share of a mean over all counted tokens of the optimizer step: `[T]` -> `[]`.

    token_level: whether every token has the same weight. If not, the mean is over sequences, of the mean within each sequence.
    """
    if token_level:
        return apply_mask(values, batch).sum() / max(1, counts.tokens)
    return sequence_means(values, batch).sum() / max(1, counts.sequences)


def masked_extreme(values: torch.Tensor, batch: PackedBatch, largest: bool) -> torch.Tensor:
    """Return the largest or smallest counted entry, `[]`; -inf or inf if none is counted."""
    if largest:
        return torch.where(batch.loss_mask, values, -torch.inf).max()
    return torch.where(batch.loss_mask, values, torch.inf).min()


def histogram_share(logs: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> torch.Tensor:
    """Return this batch's share of a histogram with the bins of `BIN_EDGES`: `[T]` log x -> `[BINS]`.

    The whole histogram has the share of the optimizer step's counted tokens in each bin.
    """
    bins = torch.bucketize(logs, torch.as_tensor(BIN_EDGES, dtype=logs.dtype, device=logs.device))
    return logs.new_zeros(BINS).index_add(0, bins, batch.loss_mask.to(logs.dtype)) / max(1, counts.tokens)


def apply_mask(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return `values`, `[T]`, with 0 where the mask is False, even for inf and nan. These entries have no gradient."""
    return torch.where(batch.loss_mask, values, 0)


def mask_impossible_tokens(batch: PackedBatch, *logprobs: torch.Tensor) -> PackedBatch:
    """Return the batch with a mask that excludes tokens to which at least one of the `[T]` log-probs gives probability 0."""
    mask = batch.loss_mask
    for token_logprobs in logprobs:
        mask = mask & (token_logprobs != -torch.inf)
    return dataclasses.replace(batch, loss_mask=mask)


def sequence_sums(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the sum over each sequence's counted tokens: `[T]` -> `[S]`."""
    values = apply_mask(values, batch)
    return values.new_zeros(len(batch.lengths)).index_add(0, _sequence_of_token(batch), values)


def sequence_means(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the mean over each sequence's counted tokens, 0 for a sequence without any: `[T]` -> `[S]`."""
    return sequence_sums(values, batch) / sequence_sums(torch.ones_like(values), batch).clamp(min=1)


def sequence_weights(batch: PackedBatch, counts: GlobalCounts) -> torch.Tensor:
    """Return each sequence's share of the counted tokens of the optimizer step, `[S]` float32."""
    return sequence_sums(torch.ones_like(batch.advantages), batch) / max(1, counts.tokens)


def per_token(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return each sequence's value at all of its tokens: `[S]` -> `[T]`."""
    return values[_sequence_of_token(batch)]


def values_before(values: torch.Tensor) -> torch.Tensor:
    """Shift `[T]` values after each token to values before each token; 0 at the start of the batch."""
    return torch.cat([values.new_zeros(1), values[:-1]])


def _sequence_of_token(batch: PackedBatch) -> torch.Tensor:
    """Return the index of the sequence that each token belongs to, `[T]` int64."""
    ends = batch.cu_seqlens[1:]
    return torch.bucketize(torch.arange(len(batch.tokens), device=ends.device), ends, right=True)
