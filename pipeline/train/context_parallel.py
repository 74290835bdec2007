"""Pad packed batches so that the layout divides them, and cut them over context-parallel ranks.

Under context parallelism each rank holds two of 2 cp equal chunks of every sequence, so each sequence is padded to a multiple
of 2 cp. The last one is padded further, until sequence parallelism divides a rank's tokens. Padding comes after a sequence's
tokens, so causal attention never reads it. Without context and sequence parallelism there is no padding.

Row t of a rank predicts the next token of its sequence, which may be on another rank, so targets are cut together with tokens.
`GatherContextParallel` and `predicting_rows` put log-probs back in the batch's order; `token_rows` does so for values, which
belong to the token itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from pipeline.train.load_balancing import BalancedRows
from pipeline.train.sequence_bounds import Packing, rows_of_rank, sequence_order, to_device
from pipeline.types import NO_EXPERT, PackedBatch


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This context-parallel rank's part of a batch: t tokens with padding. The whole batch has T tokens without padding."""

    tokens: torch.Tensor  # [1, t] int64; padding is token 0
    positions: torch.Tensor  # [1, t] int64
    targets: torch.Tensor  # [p] int64: what the head's rows predict; undefined at the end of a sequence and on padding
    candidates: torch.Tensor | None  # [p, K] int64: the teacher's tokens for each target
    packing: Packing  # of the padded sequences
    token_rows: torch.Tensor  # [T] int64: the row of token t of the batch, among the rows of all ranks
    predicting_rows: torch.Tensor  # [T] int64: the place of the prediction of token t, among the places of all ranks
    begins: torch.Tensor  # [T] bool: whether token t is the first of a sequence, which no row predicts
    head: HeadRows | None = None  # the rows of the head; None: all t rows, in places of the same number
    experts: torch.Tensor | None = None  # [t, E, K] int32, see PackedBatch.experts; NO_EXPERT for padding
    balanced: BalancedRows | None = None  # of a batch with PackedBatch.balance


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The p rows of hidden states from which the head predicts a token that a loss reads, and where predictions belong."""

    rows: torch.Tensor  # [p] int64, p > 0: of this rank's t rows
    places: torch.Tensor  # [p] int64: the places of the predictions, without repetition
    count: int  # of this rank's places; those that `places` lacks get 0


def localize(batch: PackedBatch, ranks: int, rank: int, multiple: int, group: dist.ProcessGroup | None = None) -> LocalBatch:
    """Return this rank's part of a batch.

    ranks, rank: the number of context-parallel ranks, and this rank's number in `group`. multiple: padding makes each rank's
    number of tokens a multiple of it, for sequence parallelism.
    """
    lengths = padded_lengths(batch.lengths, ranks, multiple)
    device = batch.tokens.device
    starts = list(itertools.accumulate(lengths, initial=0))
    rows_on_host = torch.cat([torch.arange(n) + start for n, start in zip(batch.lengths, starts, strict=False)])
    real = to_device(rows_on_host, device)
    tokens, positions = batch.tokens.new_zeros(starts[-1]), batch.tokens.new_zeros(starts[-1])
    targets = batch.tokens.new_zeros(starts[-1])
    tokens[real], positions[real] = batch.tokens, batch.positions
    targets[real] = batch.tokens.roll(-1)
    candidates = None
    if batch.teacher is not None:
        candidates = targets.new_zeros(len(targets), batch.teacher.tokens.size(1))
        candidates[real] = batch.teacher.tokens.clamp(min=0).roll(-1, 0)
    row_of = to_device(sequence_order(lengths, ranks), device)
    begins = batch.positions == 0
    cu_seqlens = to_device(torch.tensor(starts, dtype=torch.int32), device)
    own_rows = rows_of_rank(lengths, ranks, rank)
    rows = predicting = to_device(own_rows, device)
    head = None
    if batch.wanted is not None:
        predicts = torch.zeros(starts[-1], dtype=torch.bool)
        predicts[rows_on_host] = torch.from_numpy(batch.wanted).roll(-1)
        wanted = predicts[own_rows].nonzero()[:, 0]
        wanted = to_device(wanted if len(wanted) else torch.zeros(1, dtype=torch.int64), device)
        head, predicting = HeadRows(wanted, wanted, len(own_rows)), rows[wanted]
    return LocalBatch(
        tokens=tokens[rows][None],
        positions=positions[rows][None],
        targets=targets[predicting],
        candidates=None if candidates is None else candidates[predicting],
        packing=Packing.of_lengths(lengths, cu_seqlens, group),
        token_rows=row_of[real],
        predicting_rows=row_of[(real - 1).clamp(min=0)],
        begins=begins,
        head=head,
        experts=None if batch.experts is None else _padded(batch.experts, real, starts[-1])[rows],
        balanced=None if batch.balance is None else _balanced(batch, batch.balance, real, starts[-1], rows),
    )


def _balanced(batch: PackedBatch, weights: torch.Tensor, real: torch.Tensor, length: int, rows: torch.Tensor) -> BalancedRows:
    """Return the sequences of this rank's `rows` of a padded batch with `length` rows, of which `real` are no padding."""
    device = weights.device
    lengths = to_device(torch.tensor(batch.lengths), device)
    sequence = torch.full((length,), len(weights), device=device)
    numbers = torch.arange(len(weights), device=device)
    sequence[real] = numbers.repeat_interleave(lengths, output_size=len(batch.tokens))
    return BalancedRows(sequence[rows], torch.cat([weights / lengths.square(), weights.new_zeros(1)]))


def _padded(experts: torch.Tensor, real: torch.Tensor, length: int) -> torch.Tensor:
    """Return the experts [T, E, K] in the rows `real` of [length, E, K]; NO_EXPERT in the others."""
    padded = experts.new_full((length, *experts.shape[1:]), NO_EXPERT)
    padded[real] = experts
    return padded


def padded_lengths(lengths: tuple[int, ...], ranks: int, multiple: int) -> tuple[int, ...]:
    """Return the lengths of sequences with padding. Arguments: see `localize`."""
    unit = 2 * ranks if ranks > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    while (sum(padded) // ranks) % multiple:
        padded[-1] += unit
    return tuple(padded)


def _gather_rows(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows [t, ...] of all ranks, concatenated to [ranks * t, ...], without a graph."""
    gathered = local.new_empty(group.size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    return gathered


class GatherRows(torch.autograd.Function):
    """Gather [t, ...] of each rank of a group to [ranks * t, ...] on all of them; the backward pass reduce-scatters."""

    @staticmethod
    @override
    def forward(ctx, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather_rows(local, group)

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        part = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(part, grad.contiguous(), group=ctx.group)
        return part, None


class GatherContextParallel(GatherRows):
    """Gather [t, ...] of each rank of a group to [ranks * t, ...] on all of them.

    Every rank computes the same loss of the whole batch, so the backward pass returns only the rank's own part of the gradient.
    The sum of gradients over ranks, as in data parallelism, then counts every token once.
    """

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class ScatterRows(torch.autograd.Function):
    """Sum [ranks * t, ...] over the ranks of a group, and return this rank's part [t, ...]; the backward pass gathers."""

    @staticmethod
    @override
    def forward(ctx, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        part = partial.new_empty(len(partial) // group.size(), *partial.shape[1:])
        dist.reduce_scatter_tensor(part, partial.contiguous(), group=group)
        return part

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        return _gather_rows(grad, ctx.group), None


class SplitRows(torch.autograd.Function):
    """Return this rank's part [t, ...] of rows [ranks * t, ...] that are equal on all ranks of a group.

    The backward pass gathers, so all ranks get equal gradients.
    """

    @staticmethod
    @override
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return rows.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        return _gather_rows(grad, ctx.group), None


class ExchangeRows(torch.autograd.Function):
    """Differentiable `exchange` of several tensors. All ranks exchange the gradients of these tensors in the same order."""

    @staticmethod
    @override
    def forward(ctx, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None, *tensors: torch.Tensor):
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return tuple(exchange(tensor, group, sends, receives) for tensor in tensors)

    @staticmethod
    @override
    def backward(ctx, *grads: torch.Tensor):
        return None, None, None, *(exchange(grad, ctx.group, ctx.receives, ctx.sends) for grad in grads)


def exchange(rows: torch.Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None) -> torch.Tensor:
    """Send rows, in rank order, to all ranks of a group, and return the received rows in rank order.

    sends, receives: the number of rows to and from each rank; None: the same number for all.
    """
    if group.size() == 1:
        return rows
    received = rows.new_empty(len(rows) if receives is None else sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received
