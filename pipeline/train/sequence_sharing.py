"""Divide the sequences of a batch among ranks, for layers that compute whole sequences (sequence_resets.py).

Context- and sequence-parallel ranks hold parts of sequences. They gather the sequences, each rank computes some of them, and
the ranks exchange the results. Tensor-parallel ranks without sequence parallelism all hold the same tokens and the whole layer.
Each rank computes some sequences, and the results are summed. So no two ranks compute the same sequence. Each rank has a part
of the gradients of the layer's parameters, which must be summed over the tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from typing_extensions import override

from pipeline.train.context_parallel import GatherRows, ScatterRows
from pipeline.train.sequence_bounds import ContextPart, sequence_order


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """Tensor-parallel ranks that hold the whole layer."""

    group: dist.ProcessGroup
    sequence: bool  # each has other tokens between blocks (sequence parallelism); False: all have the same


def groups_of_parts(tensor: TensorRanks | None, context: ContextPart | None) -> list[dist.ProcessGroup]:
    """Return the groups whose ranks hold different tokens. The group whose ranks hold the smallest parts comes first."""
    sequence = [tensor.group] if tensor is not None and tensor.sequence else []
    return [*sequence, *([context.group] if context is not None else [])]


def compute_shared(
    compute: Callable[[Sequence[torch.Tensor], Sequence[int]], list[torch.Tensor]],
    hidden: torch.Tensor,
    lengths: list[int],
    tensor: TensorRanks | None,
    context: ContextPart | None,
    draws: bool,
) -> torch.Tensor:
    """Return a layer's outputs [t, H'] for this rank's tokens [t, H]. Each rank computes a share of the whole sequences.

    compute: a function of (all sequences [L, H], the numbers of some of them) that returns the outputs [L, H'] of these.
    lengths: the lengths of all sequences. draws: whether `compute` draws random numbers. If so, each rank draws different
    numbers within it; everywhere else tensor-parallel ranks draw the same numbers.
    """
    parts = groups_of_parts(tensor, context)
    copies = tensor.group if tensor is not None and not tensor.sequence else None
    if copies is not None:
        hidden = _Copy.apply(hidden, copies)
    for group in parts:
        hidden = GatherRows.apply(hidden, group)
    order = torch.arange(len(hidden)) if context is None else sequence_order(context.lengths, context.group.size())
    order = order.to(hidden.device, non_blocking=True)
    sequences = hidden[order].split(lengths)
    groups = [*parts, *([copies] if copies is not None else [])]
    ranks, rank = math.prod(group.size() for group in groups), 0
    for group in groups:
        rank = rank * group.size() + group.rank()
    mine = balance_sequences(lengths, ranks)[rank]
    with _own_draws(rank, hidden.device) if draws else contextlib.nullcontext():
        if mine:
            computed = dict(zip(mine, compute(sequences, mine), strict=True))
        else:  # every rank needs gradients of all parameters
            computed = {0: compute([sequences[0][:1]], [0])[0].expand(lengths[0], -1) * 0}
    width = next(iter(computed.values())).size(-1)
    outputs = [computed[i] if i in computed else sequences[i].new_zeros(lengths[i], width) for i in range(len(lengths))]
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    total = torch.cat(outputs)[rows]
    for group in reversed(parts):
        total = ScatterRows.apply(total, group)
    return total if copies is None else _SumCopies.apply(total, copies)


def balance_sequences(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's sequences. The longest come first, each to the rank with the fewest tokens so far.

    Example: [5, 9, 3, 2], 2 ranks -> [[1], [0, 2, 3]].
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(shares, key=lambda share: sum(lengths[j] for j in share)).append(i)
    return shares


@contextlib.contextmanager
def _own_draws(rank: int, device: torch.device) -> Iterator[None]:
    """Within this context, this rank's generators draw other numbers than other ranks' do.

    Afterwards the generators continue in the same state on all ranks.
    """
    seed = int(torch.randint(1 << 62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + rank)
        yield


class _Copy(torch.autograd.Function):
    """Returns rows that are the same on all ranks of a group; the backward pass sums the gradients of the ranks."""

    @staticmethod
    @override
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumCopies(torch.autograd.Function):
    """Sums the rows of a group's ranks. The gradient of the sum, equal on all ranks, is the gradient of each rank's rows."""

    @staticmethod
    @override
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        return grad, None
