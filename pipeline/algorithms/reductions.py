"""Sums over packed tokens, shared by the losses."""

from __future__ import annotations

import torch

from pipeline.types import GlobalCounts, PackedBatch


def masked_share(values: torch.Tensor, batch: PackedBatch, counts: GlobalCounts, token_level: bool = True) -> torch.Tensor:
    """This batch's share of a mean over all counted tokens of the optimizer step: `[T]` -> `[]`.

    Token level: every token weighs the same. Sequence level: the mean within each sequence, then the mean over sequences.
    """
    masked = torch.where(batch.loss_mask, values, 0.0)  # where, not *: an entry outside the mask may be inf or nan
    if token_level:
        return masked.sum() / max(1, counts.tokens)
    sequence = _sequence_of_token(batch)
    sums = masked.new_zeros(len(batch.lengths)).index_add(0, sequence, masked)
    sizes = masked.new_zeros(len(batch.lengths)).index_add(0, sequence, batch.loss_mask.to(masked.dtype))
    return (sums / sizes.clamp(min=1)).sum() / max(1, counts.sequences)


def masked_extreme(values: torch.Tensor, batch: PackedBatch, largest: bool) -> torch.Tensor:
    """The largest or smallest counted entry, `[]`; -inf or inf if none is counted."""
    if largest:
        return torch.where(batch.loss_mask, values, -torch.inf).max()
    return torch.where(batch.loss_mask, values, torch.inf).min()


def _sequence_of_token(batch: PackedBatch) -> torch.Tensor:
    """`[T]` int64: which sequence each token belongs to."""
    lengths = torch.tensor(batch.lengths, device=batch.tokens.device)
    return torch.repeat_interleave(
        torch.arange(len(batch.lengths), device=lengths.device), lengths, output_size=len(batch.tokens)
    )
