"""Sums over packed tokens, shared by the losses."""

from __future__ import annotations

import dataclasses

import torch

from pipeline.types import BIN_EDGES, BINS, GlobalCounts, PackedBatch


def masked_share(values: torch.Tensor, batch: PackedBatch, counts: GlobalCounts, token_level: bool = True) -> torch.Tensor:
    """This batch's share of a mean over all counted tokens of the optimizer step: `[T]` -> `[]`.

    Token level: every token weighs the same. Sequence level: the mean within each sequence, then the mean over sequences.
    """
    if token_level:
        return counted(values, batch).sum() / max(1, counts.tokens)
    return sequence_means(values, batch).sum() / max(1, counts.sequences)


def masked_extreme(values: torch.Tensor, batch: PackedBatch, largest: bool) -> torch.Tensor:
    """The largest or smallest counted entry, `[]`; -inf or inf if none is counted."""
    if largest:
        return torch.where(batch.loss_mask, values, -torch.inf).max()
    return torch.where(batch.loss_mask, values, torch.inf).min()


def histogram_share(logs: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> torch.Tensor:
    """`[T]` log x -> `[BINS]`: in each bin of `BIN_EDGES` this batch's share of all counted tokens."""
    bins = torch.bucketize(logs, torch.as_tensor(BIN_EDGES, dtype=logs.dtype, device=logs.device))
    return logs.new_zeros(BINS).index_add(0, bins, batch.loss_mask.to(logs.dtype)) / max(1, counts.tokens)


def counted(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[T]`: 0 where the mask is False, whatever is there (inf and nan too), and with no gradient."""
    return torch.where(batch.loss_mask, values, 0)


def possible(batch: PackedBatch, *logprobs: torch.Tensor) -> PackedBatch:
    """The batch without the tokens that have no probability in one of the `[T]` log-probs: they do not count."""
    mask = batch.loss_mask
    for each in logprobs:
        mask = mask & (each != -torch.inf)
    return dataclasses.replace(batch, loss_mask=mask)


def sequence_sums(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[T]` -> `[S]`: the sum over each sequence's counted tokens."""
    values = counted(values, batch)
    return values.new_zeros(len(batch.lengths)).index_add(0, _sequence_of_token(batch), values)


def sequence_means(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[T]` -> `[S]`: the mean over each sequence's counted tokens; 0 for a sequence without any."""
    return sequence_sums(values, batch) / sequence_sums(torch.ones_like(values), batch).clamp(min=1)


def per_token(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[S]` -> `[T]`: each sequence's value at all of its tokens."""
    return values[_sequence_of_token(batch)]


def _sequence_of_token(batch: PackedBatch) -> torch.Tensor:
    """`[T]` int64: which sequence each token belongs to."""
    ends = batch.cu_seqlens[1:]
    return torch.bucketize(torch.arange(len(batch.tokens), device=ends.device), ends, right=True)
