"""Causal attention over packed sequences, registered with transformers as the implementation `packed`.

Sequences lie end to end in one row of T tokens and each attends to itself only; nothing is padded. transformers hands every
keyword that the model was called with on to its attention function, so the packing travels beside the hidden states and no mask
is built at all. On CUDA in half precision one variable-length kernel does all sequences; elsewhere it is one
`scaled_dot_product_attention` per run of neighbouring sequences of equal length (so sorting a batch by length helps).

Left out, and refused rather than ignored: sliding windows, soft caps, attention sinks, masks, caches, attention dropout.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pipeline.types import PackedBatch

NAME = "packed"  # what a model's `attn_implementation` must be

# Keywords that models pass on and that change nothing here: positions are already in the queries and keys, the softmax has no
# dropout because the policy is always in evaluation mode, the layer number is bookkeeping.
_WITHOUT_EFFECT = {"position_ids", "position_embeddings", "dropout", "layer_idx"}
_VARLEN_MAX_HEAD_DIM = 256  # FlashAttention-2's


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a batch begin and end."""

    cu_seqlens: torch.Tensor  # [S+1] int32, on the device
    max_length: int
    runs: tuple[tuple[int, int], ...]  # (how many, length of each): neighbours of equal length

    @staticmethod
    def of(batch: PackedBatch) -> Packing:
        return Packing.of_lengths(batch.lengths, batch.cu_seqlens)

    @staticmethod
    def of_lengths(lengths: tuple[int, ...], cu_seqlens: torch.Tensor) -> Packing:
        runs = tuple((len(tuple(same)), length) for length, same in itertools.groupby(lengths))
        return Packing(cu_seqlens, max(lengths), runs)


def check_batch(batch: PackedBatch, vocabulary: int) -> None:
    """Raises ValueError if the fields contradict each other, which would train on wrong log-probs without a sign."""
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


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    use_cache: bool | None = False,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, D], None), as transformers wants it.

    `sliding_window` is not read: `check_attention` has made sure that it is wider than any sequence.
    Raises ValueError for anything that it would have to ignore.
    """
    if packing is None:
        raise ValueError(f"{type(module).__name__} did not pass on `packing`; its model cannot be run on packed sequences")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _WITHOUT_EFFECT)
    if attention_mask is not None or use_cache or unknown or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} asks for what packed attention does not do: mask {attention_mask is not None},"
            f" cache {bool(use_cache)}, causal {getattr(module, 'is_causal', True)}, other arguments {unknown}"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key, value, packing, scaling)[None], None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    """Causal attention of each sequence to itself: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv].

    scale: of the logits; None: 1 / sqrt(D).
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.size(-1)
    if query.is_cuda and half and width <= _VARLEN_MAX_HEAD_DIM and width % 8 == 0 and value.size(-1) == width:
        return _varlen(query, key, value, packing, scale)
    return _per_run(query, key, value, packing, scale)


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    return varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        scale=scale,
        window_size=(-1, 0),  # everything to the left, nothing to the right: causal
        enable_gqa=query.size(1) != key.size(1),
    )


def _per_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    grouped = query.size(1) != key.size(1)
    tokens = [count * length for count, length in packing.runs]
    # split, not one slice per run: its backward joins the gradients once instead of padding each to T tokens.
    pieces = zip(packing.runs, *(x.split(tokens) for x in (query, key, value)), strict=True)
    outputs = []
    for (count, length), *qkv in pieces:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)  # [count, H, length, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, H, D]
    return torch.cat(outputs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
