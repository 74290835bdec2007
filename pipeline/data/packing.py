"""Choose the sequences of each microbatch, and pack them end to end.

Pure Python over lengths, without padding. Not supported: splitting one sequence over microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from pipeline.types import NO_EXPERT, PackedBatch, Sample

_EMPTY = Sample(np.zeros(1, np.int32), np.zeros(1, bool), np.zeros(1, np.float32), np.zeros(1, np.float32))


def plan_microbatches(
    lengths: Sequence[int], data_ranks: int, max_tokens: int | None, max_sequences: int | None
) -> list[list[list[int]]]:
    """Distribute sequences over data-parallel ranks and microbatches: `plan[rank][microbatch]` lists sequence numbers.

    `lengths` has the tokens of each sequence; at least one sequence is required. An entry may also be an item of several
    sequences (`pipeline.data.batches`).

    Every sequence appears once. Every rank has the same number of microbatches, because FSDP's ranks gather weights together.
    No microbatch exceeds `max_tokens` tokens or `max_sequences` sequences. We assign sequences, the longest first, to the
    emptiest microbatch, and take the smallest number of microbatches with which this succeeds. Microbatches have similar sizes,
    since ranks wait for each other at every microbatch. Within a microbatch longer sequences come first, and equal lengths are
    adjacent. Some microbatches are empty if there are fewer sequences than microbatches (for example 3 sequences of which
    no two fit together, for 2 ranks); `pack` turns an empty one into a single token that does not count.

    Raise ValueError if a sequence exceeds `max_tokens`.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if max_tokens is not None and lengths[longest_first[0]] > max_tokens:
        raise ValueError(
            f"sample {longest_first[0]} has {lengths[longest_first[0]]} tokens; expected at most {max_tokens} in a microbatch"
        )
    tokens = max_tokens or sum(lengths)
    sequences = max_sequences or len(lengths)
    least = max(-(-sum(lengths) // tokens), -(-len(lengths) // sequences))
    rounds = -(-least // data_ranks)
    while (bins := _spread(lengths, longest_first, rounds * data_ranks, tokens, sequences)) is None:
        rounds += 1
    bins.sort(key=lambda members: -sum(lengths[i] for i in members))
    plan: list[list[list[int]]] = [[] for _ in range(data_ranks)]
    for k in range(rounds):
        of_this_round = bins[k * data_ranks : (k + 1) * data_ranks]
        # Alternate the direction, so that no rank has the largest of every round.
        for rank, members in enumerate(of_this_round if k % 2 == 0 else reversed(of_this_round)):
            plan[rank].append(members)
    return plan


def _spread(
    lengths: Sequence[int], longest_first: list[int], count: int, max_tokens: int, max_sequences: int
) -> list[list[int]] | None:
    """Assign each sequence to the bin with the fewest tokens. Return `count` bins, or None if a sequence fits in none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, b) for b in range(count)]  # a heap without the bins that have max_sequences
    for i in longest_first:
        if not emptiest or emptiest[0][0] + lengths[i] > max_tokens:
            return None
        total, b = heapq.heappop(emptiest)
        bins[b].append(i)
        if len(bins[b]) < max_sequences:
            heapq.heappush(emptiest, (total + lengths[i], b))
    return bins


def pack(samples: Sequence[Sample], device: torch.device | str) -> PackedBatch:
    """Return samples packed end to end. Without samples, return one token with a False mask, whose share of any loss is 0."""
    samples = samples or [_EMPTY]
    lengths = tuple(len(sample.tokens) for sample in samples)

    def concatenate(field: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, field) for sample in samples]).astype(dtype)).to(device)

    positions = np.concatenate([np.arange(length) for length in lengths])
    trained = np.concatenate([_read_by_loss(sample) for sample in samples])
    return PackedBatch(
        tokens=concatenate("tokens", np.int64),
        positions=torch.from_numpy(positions).to(device),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device),
        lengths=lengths,
        loss_mask=concatenate("loss_mask", np.bool_),
        generate_logprobs=concatenate("logprobs", np.float32),
        advantages=concatenate("advantages", np.float32),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32, device=device),
        wanted=trained & (positions > 0),
        prompts=_prompts(samples),
        teachers=tuple(sample.teacher for sample in samples),
        experts=_experts(samples, device),
        chunks=_chunks(samples, device),
    )


def _read_by_loss(sample: Sample) -> np.ndarray:
    """Return a mask of the tokens whose log-probs a loss can read, [L] bool."""
    return sample.loss_mask if sample.in_teacher is None else sample.loss_mask | (sample.in_teacher.chunks_of_sample >= 0)


def _chunks(samples: Sequence[Sample], device: torch.device | str) -> torch.Tensor | None:
    """Return the first token of each token's chunk, see PackedBatch.chunks; None if all teachers read the samples' tokens."""
    if all(sample.in_teacher is None for sample in samples):
        return None
    first, at = [], 0
    for sample in samples:
        tokens = np.arange(len(sample.tokens))
        if sample.in_teacher is not None:
            chunks = sample.in_teacher.chunks_of_sample
            _, begins, number = np.unique(chunks, return_index=True, return_inverse=True)
            tokens = np.where(chunks < 0, tokens, begins[number])
        first.append(at + tokens)
        at += len(tokens)
    return torch.from_numpy(np.concatenate(first)).to(device)


def _experts(samples: Sequence[Sample], device: torch.device | str) -> torch.Tensor | None:
    """Return the experts of all tokens, see PackedBatch.experts; None if no sample has any."""
    shapes = {sample.experts.shape[1:] for sample in samples if sample.experts is not None}
    if not shapes:
        return None
    (shape,) = shapes  # of one model
    rows: list[np.ndarray] = []
    for sample in samples:
        recorded = np.zeros((0, *shape), np.int32) if sample.experts is None else sample.experts.astype(np.int32)
        rows += [recorded, np.full((len(sample.tokens) - len(recorded), *shape), NO_EXPERT, np.int32)]
    return torch.from_numpy(np.concatenate(rows)).to(device)


def _prompts(samples: Sequence[Sample]) -> tuple[tuple[int, int], ...]:
    """Return (the first sample with the same prompt, the prompt's length) of each sample.

    The prompt is the tokens before the first trained token.
    """
    first: dict[bytes, int] = {}
    prompts = []
    for number, sample in enumerate(samples):
        length = int(sample.loss_mask.argmax())
        prompts.append((first.setdefault(sample.tokens[:length].tobytes(), number), length))
    return tuple(prompts)


def pack_each(samples: Sequence[Sample], microbatches: Sequence[list[int]], device: torch.device | str) -> list[PackedBatch]:
    """Return a packed batch for each of `microbatches`, which are lists of positions in `samples`."""
    return [pack([samples[i] for i in members], device) for members in microbatches]
