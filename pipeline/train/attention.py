"""Causal attention over packed sequences: the one place where both train backends compute it.

Sequences lie end to end in one row of T tokens, and each attends only to itself; nothing is padded. On CUDA in half precision,
one variable-length kernel computes all sequences, with windows and sinks too. Elsewhere, and with soft caps or chunks,
`attention_blocks` computes one run of neighbouring sequences of equal length at a time, so sorting a batch by length helps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from pipeline.train.attention_blocks import AttentionKind, causal
from pipeline.train.context_parallel import GatherRows
from pipeline.train.packing import ContextPart, Packing

__all__ = ["AttentionKind", "attend"]

_VARLEN_MAX_HEAD_DIM = 256  # limit of FlashAttention-2


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
    rank's number of tokens, and keys and values of the other context-parallel ranks are gathered.
    """
    kind = kind.of_length(packing.max_length)
    if packing.context is not None:
        return _over_ranks(query, key, value, packing.context, kind, sinks)
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.size(-1)
    fits = half and width <= _VARLEN_MAX_HEAD_DIM and width % 8 == 0 and value.size(-1) == width
    if query.is_cuda and fits and kind.softcap is None and kind.chunk is None:
        return _varlen(query, key, value, packing, kind, sinks)
    return _per_run(query, key, value, packing, kind, sinks)


def _varlen(query, key, value, packing: Packing, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    # (keys to the left, keys to the right), without the query's own; -1: everything.
    window = (-1 if kind.window is None else kind.window - 1, 0)
    if sinks is not None:
        return VarlenWithSinks.apply(query, key, value, sinks, packing, kind.scale, window)
    output = varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        scale=kind.scale,
        window_size=window,
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(output, torch.Tensor)  # a tuple only where auxiliary outputs are requested
    return output


class VarlenWithSinks(torch.autograd.Function):
    """The variable-length kernel with sinks: query [T, Hq, D], key and value [T, Hkv, D], sinks [Hq] -> [T, Hq, D].

    A sink adds exp(sink) to the normalizer exp(lse) of a query's probabilities. So the output is the kernel's times
    sigmoid(lse - sink), and the kernel's backward is right if it gets the new output and the new normalizer.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, packing: Packing, scale: float | None, window: tuple[int, int]):
        starts, longest = packing.cu_seqlens, packing.max_length
        arguments = (starts, starts, longest, longest, window == (-1, 0))
        grouped = query.size(1) != key.size(1)
        operators: Any = torch.ops.torch_attn
        out, lse, random = operators._varlen_attn(query, key, value, *arguments, scale, list(window), grouped)
        sink = sinks.float()[:, None]  # [Hq, 1]; lse [Hq, T]
        out = (out * torch.sigmoid(lse - sink).T[:, :, None]).to(query.dtype)
        lse = torch.logaddexp(lse, sink)
        ctx.save_for_backward(query, key, value, sinks, out, lse, random)
        ctx.arguments, ctx.scale, ctx.window = arguments, scale, list(window)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, lse, random = ctx.saved_tensors
        grad = grad.contiguous()
        operators: Any = torch.ops.torch_attn
        gradients = operators._varlen_attn_backward(
            grad, query, key, value, out, lse, *ctx.arguments, random, ctx.scale, ctx.window
        )
        # d out / d sink = -p(sink) out
        share = torch.exp(sinks.float()[:, None] - lse)
        grad_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1)
        return *gradients, grad_sinks.to(sinks.dtype), None, None, None


def _per_run(query, key, value, packing: Packing, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    tokens = [count * length for count, length in packing.runs]
    # The backward of one split concatenates the gradients once; the backward of a slice per run would pad each to T tokens.
    pieces = zip(packing.runs, *(x.split(tokens) for x in (query, key, value)), strict=True)
    outputs = []
    for (count, length), *qkv in pieces:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)  # [count, H, length, D]
        outputs.append(causal(q, k, v, kind, sinks).transpose(1, 2).flatten(0, 1))  # [count * length, H, D]
    return torch.cat(outputs)


def _over_ranks(query, key, value, context: ContextPart, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    ranks, rank = context.group.size(), context.group.rank()
    both = GatherRows.apply(torch.cat([key, value], -1), context.group)
    local_lengths = [length // ranks for length in context.lengths]
    of_rank = [part.split(local_lengths) for part in both.view(ranks, -1, *both.shape[1:])]
    outputs = []
    for i, (length, q) in enumerate(zip(context.lengths, query.split(local_lengths), strict=True)):
        chunk = length // (2 * ranks)
        halves = [part[i] for part in of_rank]
        whole = torch.cat([h[:chunk] for h in halves] + [h[chunk:] for h in reversed(halves)])
        k, v = (x.transpose(0, 1)[None] for x in whole.split([key.size(-1), value.size(-1)], -1))  # [1, Hkv, length, D]
        for part, number in zip(q.split(chunk), (rank, 2 * ranks - 1 - rank), strict=True):
            first = number * chunk
            out = causal(part.transpose(0, 1)[None], k, v, kind, sinks, first)
            outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
