"""Attention with soft caps or chunks on a GPU, by torch's flex attention: one compiled kernel for all sequences.

With any window, chunks, sequences and context-parallel part, the keys that a query sees are contiguous rows that end at its
own. So two numbers for each query, the first and the last of these rows, define the mask. The kernel skips the blocks of keys
that no query of a block sees (https://arxiv.org/abs/2412.05496). Sinks are applied to the kernel's output with the log-sum-exp
that it returns, as `attention.VarlenWithSinks` describes.

The results were compared with those of `attention_blocks` on the CPU. The kernels themselves have not run on a GPU yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from pipeline.train.attention_blocks import AttentionKind
from pipeline.train.kernels import missing_dependency

HALF = (torch.bfloat16, torch.float16)
BLOCK = 128  # queries, and keys, of a block of the mask
_LEAST_WIDTH = 16  # of heads, for the compiled kernel


def lacking(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why flex attention does not compute these queries [T, Hq, D] and values [K, Hkv, Dv]; None if it does."""
    if query.dtype not in HALF:
        return f"tensors are {str(query.dtype).removeprefix('torch.')}"
    if min(query.size(-1), value.size(-1)) < _LEAST_WIDTH:
        return f"heads are narrower than {_LEAST_WIDTH}"
    missing = _missing(query.device.type)
    return f"there is no {missing}" if missing else None


@functools.cache
def _missing(device_type: str) -> str | None:
    return missing_dependency(torch.device(device_type))


@functools.cache
def _compiled_kernel() -> Callable[..., Any]:
    """Return the compiled kernel for any number of tokens.

    The compiler makes no choice by timing, so a run that starts again has the same kernel.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, options={"deterministic": True})


def flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    kind: AttentionKind,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of spans of queries: query [T, Hq, D], key [K, Hkv, D], value [K, Hkv, Dv] -> [T, Hq, Dv].

    starts: running sums of the spans' queries and of their keys, [spans + 1] int32 each. A span's last query is at its last
    key. sinks [Hq]: see `attend`.
    """
    low, high = visible(*starts, query.size(0), kind)
    arguments = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, H, T, D]
    # A scale or a cap is a constant of the graph, also where models or layers differ in it: torch 2.13 fails on dynamic ones.
    with torch._dynamo.config.patch(specialize_float=True):
        result = _compiled_kernel()(
            *arguments,
            score_mod=None if kind.softcap is None else _softcap(kind.softcap),
            block_mask=block_mask(low, high, key.size(0)),
            scale=kind.scale,
            enable_gqa=query.size(1) != key.size(1),
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
    if sinks is None:
        return result[0].transpose(0, 1)
    out, aux = result
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # [1, Hq, T]
    return (out * share[..., None]).to(query.dtype)[0].transpose(0, 1)


@functools.cache
def _softcap(limit: float) -> Callable[..., torch.Tensor]:
    def cap(score, batch, head, query, key):
        return limit * torch.tanh(score / limit)

    return cap


def visible(queries: torch.Tensor, keys: torch.Tensor, count: int, kind: AttentionKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last row of keys that each of `count` queries sees, [count] int32 each.

    queries, keys: see `flex`.
    """
    rows = torch.arange(count, device=queries.device, dtype=torch.int32)
    span = torch.bucketize(rows, queries[1:], right=True)
    position = rows - queries[span] + (keys.diff() - queries.diff())[span]
    first = torch.zeros_like(position)
    if kind.window is not None:
        first = (position - kind.window + 1).clamp(min=0)
    if kind.chunk is not None:
        first = torch.maximum(first, position // kind.chunk * kind.chunk)
    return keys[span] + first, keys[span] + position


def block_mask(low: torch.Tensor, high: torch.Tensor, keys: int) -> BlockMask:
    """Return the mask in which query q sees the keys low[q] to high[q], both included. low, high: [T] int32.

    keys: the number of keys. The function makes no matrix of T x keys entries, and does not wait for the device.
    """
    count = len(low)
    padding = (-count) % BLOCK
    lows, highs = (torch.cat([x, x[-1:].expand(padding)]).view(-1, BLOCK) for x in (low, high))
    begins = torch.arange(0, keys, BLOCK, device=low.device)  # of blocks of keys
    ends = begins + BLOCK - 1
    visible = (lows.amin(1)[:, None] <= ends) & (highs.amax(1)[:, None] >= begins)
    full = (lows.amax(1)[:, None] <= begins) & (highs.amin(1)[:, None] >= ends)

    def mask(batch, head, query, key):
        return (key >= low[query]) & (key <= high[query])

    return BlockMask.from_kv_blocks(
        *_block_order(visible & ~full), *_block_order(full), BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(count, keys)
    )


def _block_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (number of key blocks of each query block, all key blocks' numbers with those of the query block first).

    blocks [query blocks, key blocks] bool: whether a key block belongs to a query block.
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
