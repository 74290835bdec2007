"""Causal attention over packed sequences: the one place where both train backends compute it.

Sequences lie end to end in one row of T tokens, and each attends only to itself; nothing is padded. On CUDA in half precision,
one variable-length kernel computes all sequences. Elsewhere there is one `scaled_dot_product_attention` for each run of
neighbouring sequences of equal length, so sorting a batch by length helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from pipeline.train.context_parallel import GatherRows
from pipeline.train.packing import ContextPart, Packing

_VARLEN_MAX_HEAD_DIM = 256  # limit of FlashAttention-2


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What distinguishes the attention of one layer."""

    scale: float | None = None  # factor of the scores; None: 1 / sqrt(D)
    window: int | None = None  # number of keys that a query sees, its own included; None: all keys up to its own
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap), before the mask


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    kind: AttentionKind,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, Hq, Dv].

    sinks [Hq]: a score per head that takes part in the softmax and has no value (gpt-oss). With `packing.context`, T is this
    rank's number of tokens, and keys and values of the other context-parallel ranks are gathered. Raises ValueError for a
    kind that is not supported.
    """
    if kind.window is not None or kind.softcap is not None or sinks is not None:
        raise ValueError(f"packed attention does not support {kind} with sinks: {sinks is not None}")
    if packing.context is not None:
        return _over_ranks(query, key, value, packing.context, kind)
    scale = kind.scale
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


def _over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ContextPart, kind: AttentionKind
) -> torch.Tensor:
    ranks, rank = context.group.size(), context.group.rank()
    both = GatherRows.apply(torch.cat([key, value], -1), context.group)
    local_lengths = [length // ranks for length in context.lengths]
    of_rank = [part.split(local_lengths) for part in both.view(ranks, -1, *both.shape[1:])]
    outputs, device = [], query.device  # on the device, because a mask from the host would wait for it in every layer
    for i, (length, q) in enumerate(zip(context.lengths, query.split(local_lengths), strict=True)):
        chunk = length // (2 * ranks)
        halves = [part[i] for part in of_rank]
        whole = torch.cat([h[:chunk] for h in halves] + [h[chunk:] for h in reversed(halves)])
        k, v = whole.split([key.size(-1), value.size(-1)], -1)
        own = torch.arange(chunk, device=device)
        positions = torch.cat([own + c * chunk for c in (rank, 2 * ranks - 1 - rank)])
        mask = positions[:, None] >= torch.arange(length, device=device)
        outputs.append(_masked(q, k, v, mask, kind.scale))
    return torch.cat(outputs)


def _masked(query, key, value, mask: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Compute attention with a mask: query [t, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv], mask [t, T] -> [t, Hq, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out[0].transpose(0, 1)
