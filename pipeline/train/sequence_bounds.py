"""The boundaries of the sequences of a packed batch, for attention and for other layers that mix tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeline.types import PackedBatch


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of neighbouring queries, and the keys of each span. The last query of a span sees the last of its keys."""

    spans: tuple[tuple[int, int], ...]  # (queries, keys) of each span
    query_starts: torch.Tensor  # [spans + 1] int32, on the device: cumulative number of the spans' queries
    key_starts: torch.Tensor  # [spans + 1] int32, on the device: cumulative number of the spans' keys
    key_rows: torch.Tensor  # [keys] int64, on the device: row of each of the spans' keys

    @staticmethod
    def tensors(
        spans: Sequence[tuple[int, int]], keys: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors of these spans. keys: the rows of each span's keys."""
        starts = [torch.tensor([0, *itertools.accumulate(part)], dtype=torch.int32) for part in zip(*spans, strict=True)]
        query_starts, key_starts, key_rows = (to_device(tensor, device) for tensor in (*starts, torch.cat(list(keys))))
        return query_starts, key_starts, key_rows


@dataclass(frozen=True, slots=True)
class ContextPart(Spans):
    """The part of packed sequences that a context-parallel rank holds: two spans of each sequence.

    For R ranks, each sequence is padded to a multiple of 2 R and cut into 2 R equal chunks. Rank r holds the chunks r and
    2 R - 1 - r, so all ranks have equal work under a causal mask. `key_rows` are rows of the gathered keys of all ranks.
    """

    group: dist.ProcessGroup  # of context-parallel ranks
    lengths: tuple[int, ...]  # of the S padded sequences, over all ranks

    @staticmethod
    def of(group: dist.ProcessGroup, lengths: tuple[int, ...], device: torch.device) -> ContextPart:
        """Return the part that this rank of `group` holds."""
        ranks, order = group.size(), sequence_order(lengths, group.size())
        spans, keys = [], []
        for length, positions in zip(lengths, order.split(lengths), strict=True):
            chunk = length // (2 * ranks)
            for number in (group.rank(), 2 * ranks - 1 - group.rank()):
                spans.append((chunk, (number + 1) * chunk))
                keys.append(positions[: (number + 1) * chunk])
        return ContextPart(tuple(spans), *Spans.tensors(spans, keys, device), group, lengths)


@dataclass(eq=False, slots=True)
class Packing:
    """The boundaries of the sequences of a batch.

    Not frozen: torch 2.11 compiles layers again for each change of a frozen dataclass's values.
    """

    cu_seqlens: torch.Tensor  # [S+1] int32, on the device
    max_length: int
    runs: tuple[tuple[int, int], ...]  # (count, length) of neighbouring sequences of equal length
    context: ContextPart | None = None  # the part of the batch that this context-parallel rank holds; None: all of it
    shared: Spans | None = None  # of sequences that share the rows of their prompts; None: each sequence has all of its rows

    @property
    def spans(self) -> Spans | None:
        """The spans of the rows that this rank holds; None if each sequence is one span of its own rows."""
        return self.context or self.shared

    @staticmethod
    def of(batch: PackedBatch) -> Packing:
        """Return the packing of a batch."""
        return Packing.of_lengths(batch.lengths, batch.cu_seqlens)

    @staticmethod
    def of_lengths(lengths: tuple[int, ...], cu_seqlens: torch.Tensor, group: dist.ProcessGroup | None = None) -> Packing:
        """Return the packing of sequences with these lengths.

        cu_seqlens: the running sum of the lengths, [S+1] int32 on the device. group: the context-parallel ranks; None, or a
        group of one rank: no context parallelism.
        """
        runs = tuple((len(tuple(run)), length) for length, run in itertools.groupby(lengths))
        context = None
        if group is not None and group.size() > 1:
            context = ContextPart.of(group, lengths, cu_seqlens.device)
        return Packing(cu_seqlens, max(lengths), runs, context)

    def starts_on_host(self) -> torch.Tensor:
        """Return `cu_seqlens` in host memory, without waiting for the device."""
        lengths = (length for count, length in self.runs for _ in range(count))
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on the device. A GPU gets it from pinned memory; a copy from other memory would wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def rows_of_rank(lengths: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """Return the rows of the padded batch that a rank holds: chunks `rank` and 2 * ranks - 1 - rank of each sequence."""
    if ranks == 1:
        return torch.arange(sum(lengths))
    rows, start = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        rows += [torch.arange(chunk) + start + c * chunk for c in (rank, 2 * ranks - 1 - rank)]
        start += length
    return torch.cat(rows)


def sequence_order(lengths: tuple[int, ...], ranks: int) -> torch.Tensor:
    """Return, for each token of the padded batch, its row in the concatenated rows of all ranks, [T] int64."""
    rows = torch.cat([rows_of_rank(lengths, ranks, r) for r in range(ranks)])
    order = torch.empty_like(rows)
    order[rows] = torch.arange(len(rows))
    return order


def check_batches(batches: Sequence[PackedBatch], vocabulary: int) -> None:
    """Check all batches, before any computation, since each check waits for the GPU. Raises ValueError as `check_batch`."""
    for batch in batches:
        check_batch(batch, vocabulary)


def check_batch(batch: PackedBatch, vocabulary: int) -> None:
    """Raise ValueError if the batch's fields contradict each other: training would silently use wrong log-probs."""
    if not batch.lengths or min(batch.lengths) < 1:
        raise ValueError(f"lengths {batch.lengths}: a batch holds at least one sequence and no empty ones")
    total = sum(batch.lengths)
    device = batch.tokens.device
    if batch.tokens.shape != (total,):
        raise ValueError(f"tokens has shape {tuple(batch.tokens.shape)}, but the lengths sum to {total}")
    cu_seqlens = torch.tensor([0, *itertools.accumulate(batch.lengths)], dtype=torch.int32)
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], torch.tensor(batch.lengths))
    if batch.cu_seqlens.dtype != torch.int32 or not torch.equal(batch.cu_seqlens, cu_seqlens.to(device)):
        raise ValueError("cu_seqlens is not the running sum of the lengths, from 0, in int32")
    if not torch.equal(batch.positions, positions.to(device)):
        raise ValueError("positions do not restart at 0 in each sequence")
    low, high = batch.tokens.aminmax()
    if low < 0 or high >= vocabulary:
        raise ValueError(f"token ids from {int(low)} to {int(high)} do not fit a vocabulary of {vocabulary}")
    if batch.teacher is not None and batch.teacher.tokens.max() >= vocabulary:
        raise ValueError(f"a teacher's tokens do not fit a vocabulary of {vocabulary}")
