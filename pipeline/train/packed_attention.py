"""Causal attention over packed sequences, registered with transformers as the implementation `packed`.

Sequences lie end to end in one row of T tokens, and each attends only to itself; nothing is padded. transformers passes the
model's keyword arguments to its attention function. The packing is passed this way, so no mask is built. On CUDA in half
precision, one variable-length kernel computes all sequences. Elsewhere there is one `scaled_dot_product_attention` for each run
of neighbouring sequences of equal length, so sorting a batch by length helps.

Not supported, with an error: sliding windows, soft caps, attention sinks, masks, caches, attention dropout.
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

NAME = "packed"  # value of a model's `attn_implementation`

# Keywords that models pass and that have no effect here: queries and keys already contain the positions, the policy is always
# in evaluation mode without dropout, and the layer number is informative only.
_WITHOUT_EFFECT = {"position_ids", "position_embeddings", "dropout", "layer_idx"}
_VARLEN_MAX_HEAD_DIM = 256  # limit of FlashAttention-2


@dataclass(frozen=True, slots=True)
class Packing:
    """The boundaries of the sequences of a batch."""

    cu_seqlens: torch.Tensor  # [S+1] int32, on the device
    max_length: int
    runs: tuple[tuple[int, int], ...]  # (count, length) of neighbouring sequences of equal length

    @staticmethod
    def of(batch: PackedBatch) -> Packing:
        """Return the packing of a batch."""
        return Packing.of_lengths(batch.lengths, batch.cu_seqlens)

    @staticmethod
    def of_lengths(lengths: tuple[int, ...], cu_seqlens: torch.Tensor) -> Packing:
        """Return the packing of sequences with these lengths. cu_seqlens: their running sum, [S+1] int32 on the device."""
        runs = tuple((len(tuple(same)), length) for length, same in itertools.groupby(lengths))
        return Packing(cu_seqlens, max(lengths), runs)


def check_batch(batch: PackedBatch, vocabulary: int) -> None:
    """Raise ValueError if the fields contradict each other, because training would then use wrong log-probs silently."""
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
    """Compute attention in transformers' interface.

    query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, D], None).

    `sliding_window` is not used: `check_attention` ensures that it is at least as wide as any sequence. Raises ValueError for
    arguments that are not supported.
    """
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} did not pass `packing` to attention; its model cannot run on packed sequences"
        )
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _WITHOUT_EFFECT)
    if attention_mask is not None or use_cache or unknown or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} uses what packed attention does not support: mask {attention_mask is not None},"
            f" cache {bool(use_cache)}, causal {getattr(module, 'is_causal', True)}, other arguments {unknown}"
        )
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(query, key, value, packing, scaling)[None], None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    """Compute causal attention within each sequence: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv].

    scale: factor of the attention scores; None for 1 / sqrt(D).
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.size(-1)
    if query.is_cuda and half and width <= _VARLEN_MAX_HEAD_DIM and width % 8 == 0 and value.size(-1) == width:
        return _varlen(query, key, value, packing, scale)
    return _per_run(query, key, value, packing, scale)


def _varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None) -> torch.Tensor:
    output = varlen_attn(
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
    assert isinstance(output, torch.Tensor)  # a tuple only where auxiliary outputs are requested
    return output


def _per_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    grouped = query.size(1) != key.size(1)
    tokens = [count * length for count, length in packing.runs]
    # The backward of one split concatenates the gradients once; the backward of a slice per run would pad each to T tokens.
    pieces = zip(packing.runs, *(x.split(tokens) for x in (query, key, value)), strict=True)
    outputs = []
    for (count, length), *qkv in pieces:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)  # [count, H, length, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, H, D]
    return torch.cat(outputs)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
