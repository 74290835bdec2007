"""Exact attention of sequences of equal length, block by block: windows, chunks, soft caps and sinks on any device.

A block of queries computes only with the keys that one of its queries sees, so a small window costs less than full attention.
Scores with a soft cap or sinks are computed in full for one block at a time, and once more in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

_BLOCK = 256  # the fewest queries of a block, unless the sequence is shorter


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The kind of attention of one layer: its scale, mask and soft cap."""

    scale: float | None = None  # factor of the scores; None: 1 / sqrt(D)
    window: int | None = None  # number of keys that a query sees, its own included; None: all keys up to its own
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap), before the mask
    chunk: int | None = None  # a query sees the keys up to its own in its chunk of this many positions (Llama 4); None: all

    def of_length(self, longest: int) -> AttentionKind:
        """Return the same kind without a window or a chunk that has no effect on sequences of at most `longest` tokens."""
        window = self.window if self.window is not None and self.window < longest else None
        chunk = self.chunk if self.chunk is not None and self.chunk < longest else None
        return AttentionKind(self.scale, window, self.softcap, chunk)

    @property
    def local(self) -> int | None:
        """The largest number of keys that a query sees; None: all keys up to its own."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits, default=None)

    def first_seen(self, position: int) -> int:
        """Return the position of the first key that the query at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return a mask [t, T] bool, which is true where a query sees a key. queries [t], keys [T]: their positions."""
        visible = queries[:, None] >= keys
        if self.window is not None:
            visible &= queries[:, None] - keys < self.window
        if self.chunk is not None:
            visible &= queries[:, None] // self.chunk == keys // self.chunk
        return visible


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: AttentionKind,
    sinks: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Compute attention of n sequences: query [n, Hq, t, D], key [n, Hkv, L, D], value [n, Hkv, L, Dv] -> [n, Hq, t, Dv].

    Keys begin at position 0 and queries at position `first`. sinks: see `attend`.
    """
    length, explicit = query.size(2), kind.softcap is not None or sinks is not None
    if kind.local is None and not explicit:
        if first == 0:
            return _product(query, key[:, :, :length], value[:, :, :length], None, kind.scale)
        return _part(query, key, value, kind, sinks, first, first + length)
    block = max(_BLOCK, kind.local or 0)
    # The backward of one split concatenates the gradients once; the backward of a slice per block would pad each.
    keys, values = key.split(block, 2), value.split(block, 2)
    outputs, start = [], first
    for part in query.split(block, 2):
        end = start + part.size(2)
        low = kind.first_seen(start) // block
        k, v = (torch.cat(pieces[low : -(-end // block)], 2) for pieces in (keys, values))
        arguments = (part, k, v, kind, sinks, start, end, low * block)
        if explicit and length > block and torch.is_grad_enabled():
            outputs.append(checkpoint(_part, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_part(*arguments))
        start = end
    return torch.cat(outputs, 2)


def _part(query, key, value, kind: AttentionKind, sinks: torch.Tensor | None, start: int, end: int, low: int = 0):
    """Compute attention of the queries at positions `start` to `end`. key, value: those of the positions from `low` on."""
    first = kind.first_seen(start)
    k, v = (x[:, :, first - low : end - low] for x in (key, value))
    positions = torch.arange(first, end, device=query.device)  # on the device, because a mask from the host would wait for it
    mask = kind.mask(positions[start - first :], positions)
    if kind.softcap is None and sinks is None:
        return _product(query, k, v, mask, kind.scale)
    return _explicit(query, k, v, mask, kind, sinks)


def _product(query, key, value, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _explicit(query, key, value, mask: torch.Tensor, kind: AttentionKind, sinks: torch.Tensor | None) -> torch.Tensor:
    count, heads, length, width = query.shape
    groups = heads // key.size(1)
    scale = width**-0.5 if kind.scale is None else kind.scale
    # Query heads of one key head are rows of one product.
    scores = query.reshape(count, -1, groups * length, width) @ key.transpose(2, 3) * scale
    scores = scores.view(count, -1, groups, length, key.size(2))
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype).view(1, -1, groups, 1, 1).expand(count, -1, -1, length, 1)
        probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (probabilities.to(value.dtype).flatten(2, 3) @ value).view(count, heads, length, value.size(3))
