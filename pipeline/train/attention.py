"""Causal attention over packed sequences: the one place where both train backends compute it.

Sequences lie end to end in one row of T tokens, and each attends only to itself; nothing is padded. On CUDA in half precision,
one variable-length kernel computes all sequences, with windows and sinks too; flex attention takes soft caps and chunks.
In all other cases `attention_blocks` computes one run of neighbouring sequences of equal length at a time, so sorting a batch
by length makes it faster. If this happens on CUDA, a log line gives the reason.

Under context parallelism a rank has two chunks of each sequence. It gathers keys and values of all ranks, and computes each
chunk with the keys up to its own end, by the same kernel or one run of equal chunks at a time. Sequences that share the rows of
their prompt (shared_prompts.py) are computed like chunks: each with the prompt's keys and its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

from pipeline.node import torch_features
from pipeline.train.attention_blocks import AttentionKind, causal
from pipeline.train.context_parallel import GatherRows
from pipeline.train.flex_attention import HALF, flex, lacking
from pipeline.train.sequence_bounds import Packing, Spans

__all__ = ["AttentionKind", "attend"]

logger = logging.getLogger(__name__)

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
    kind, context, spans = kind.of_length(packing.max_length), packing.context, packing.spans
    by_kernel = _fits_kernel(query, value, kind)
    by_flex = not by_kernel and query.is_cuda and _fits_flex(query, value, kind)
    if context is not None:
        of_all_ranks = GatherRows.apply(torch.cat([key, value], -1), context.group)
        key, value = of_all_ranks.index_select(0, context.key_rows).split([key.size(-1), value.size(-1)], -1)
    elif spans is not None:
        key, value = (x.index_select(0, spans.key_rows) for x in (key, value))
    if by_kernel:
        return _varlen(query, key, value, KernelSpans.of(packing), kind, sinks)
    if by_flex:
        return flex(query, key, value, KernelSpans.of(packing)[:2], kind, sinks)
    if spans is not None:
        return _per_span(query, key, value, spans, kind, sinks)
    return _per_run(query, key, value, packing, kind, sinks)


def _fits_kernel(query: torch.Tensor, value: torch.Tensor, kind: AttentionKind) -> bool:
    """Return whether the variable-length kernel computes this attention."""
    width = query.size(-1)
    half = query.is_cuda and query.dtype in HALF
    fits = half and width <= _VARLEN_MAX_HEAD_DIM and width % 8 == 0 and value.size(-1) == width
    return fits and kind.softcap is None and kind.chunk is None


def _fits_flex(query: torch.Tensor, value: torch.Tensor, kind: AttentionKind) -> bool:
    """Return whether flex attention computes this attention on CUDA; log the reason if it does not.

    It is called where `_fits_kernel` returned False.
    """
    reason = f"query heads are {query.size(-1)} wide and value heads {value.size(-1)}"
    if kind.softcap is not None or kind.chunk is not None or query.dtype not in HALF:
        reason = lacking(query, value)
    if reason is not None:
        _log_blocks(reason)
    return reason is None


@functools.cache
def _log_blocks(reason: str) -> None:
    logger.warning("attention runs block by block, which is exact but slower than a kernel, because %s", reason)


class KernelSpans(NamedTuple):
    """Spans of queries and their keys, in the form that the variable-length kernel takes.

    The last query of a span sees the last key of the span.
    """

    queries: torch.Tensor  # [spans + 1] int32: the running sum of queries
    keys: torch.Tensor  # [spans + 1] int32
    most_queries: int  # of a span
    most_keys: int

    @staticmethod
    def of(packing: Packing) -> KernelSpans:
        """Return the packing's spans: one per sequence unless `packing.spans` has others."""
        starts, longest, spans = packing.cu_seqlens, packing.max_length, packing.spans
        if spans is None:
            return KernelSpans(starts, starts, longest, longest)
        most_queries, most_keys = (max(counts) for counts in zip(*spans.spans, strict=True))
        return KernelSpans(spans.query_starts, spans.key_starts, most_queries, most_keys)


def _varlen(query, key, value, spans: KernelSpans, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    # (keys to the left, keys to the right), without the query's own; -1: everything.
    window = (-1 if kind.window is None else kind.window - 1, 0)
    if sinks is not None:
        return VarlenWithSinks.apply(query, key, value, sinks, spans, kind.scale, window)
    grouped = {"enable_gqa": query.size(1) != key.size(1)} if torch_features.takes(varlen_attn, "enable_gqa") else {}
    output = varlen_attn(query, key, value, *spans, scale=kind.scale, window_size=window, **grouped)
    assert isinstance(output, torch.Tensor)  # a tuple only where auxiliary outputs are requested
    return output


class VarlenWithSinks(torch.autograd.Function):
    """The variable-length kernel with sinks: query [T, Hq, D], key and value [T, Hkv, D], sinks [Hq] -> [T, Hq, D].

    A sink adds exp(sink) to the normalizer exp(lse) of a query's probabilities. So the output is the kernel's times
    sigmoid(lse - sink), and the kernel's backward is right if it gets the new output and the new normalizer.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, spans: KernelSpans, scale: float | None, window: tuple[int, int]):
        arguments = (*spans, window == (-1, 0))
        operators: Any = torch.ops.torch_attn
        # The operator takes fewer key heads without enable_gqa, which torch 2.11 does not have.
        out, lse, random = operators._varlen_attn(query, key, value, *arguments, scale, list(window))
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


def _per_span(query, key, value, spans: Spans, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    runs = [(len(tuple(run)), *sizes) for sizes, run in itertools.groupby(spans.spans)]  # neighbouring spans of equal sizes
    queries, keys = [count * size for count, size, _ in runs], [count * size for count, _, size in runs]
    outputs = []
    for (count, *_), *qkv in zip(runs, query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in qkv)  # [count, H, length, D]
        outputs.append(causal(q, k, v, kind, sinks, k.size(2) - q.size(2)).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)
