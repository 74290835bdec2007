"""KV cache of the running rows, and the attention that reads it, for the transformers backend.

Row r, column p holds the key or value of token p of sequence r. Columns are positions, so rows of any length share a tensor
without left padding. Rows are dense: the running rows are 0 .. R-1. Transformers' models pass their keys and values to
`update`, the only method of its Cache that a full-attention decoder calls. Sliding windows, attention sinks and soft caps are
not supported: `attention` refuses them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION = "hetstep_rows"
_BLOCK = 64  # columns are allocated in multiples of this


class RowCache:
    """Keys and values of all layers. Call `reserve` and set `rows`, `positions` and `length` before each forward.

    The model then calls `update` once per layer.
    """

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}  # by layer, from first use on: [rows, kv heads, columns, key dim]
        self._values: dict[int, torch.Tensor] = {}
        self._size = (0, 0)  # rows and columns
        self.rows: torch.Tensor  # [R] int64: rows of this forward's sequences
        self.positions: torch.Tensor | None  # [R] int64 when decoding (rows are 0 .. R-1); None: prefill from position 0
        self.length: int  # columns to attend to when decoding

    def reserve(self, rows: int, columns: int) -> None:
        """Grow to at least `rows` x `columns`, keeping the contents."""
        if rows <= self._size[0] and columns <= self._size[1]:
            return
        self._size = max(rows, self._size[0]), -(-max(columns, self._size[1]) // _BLOCK) * _BLOCK
        for caches in (self._keys, self._values):
            for layer, cache in caches.items():
                caches[layer] = self._zeros(cache)
                caches[layer][: cache.shape[0], :, : cache.shape[2]] = cache

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values [R, kv heads, new tokens, dim], and return the keys and values to attend to.

        In a prefill the returned keys and values are the new ones; in decoding they are all keys and values so far.
        """
        if layer_idx not in self._keys:
            self._keys[layer_idx], self._values[layer_idx] = self._zeros(key), self._zeros(value)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self.positions is None:
            keys[self.rows, :, : key.shape[2]] = key
            values[self.rows, :, : value.shape[2]] = value
            return key, value
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        return keys[: len(self.rows), :, : self.length], values[: len(self.rows), :, : self.length]

    def copy(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy rows `sources` to rows `targets`, in their first `length` columns."""
        for cache in (*self._keys.values(), *self._values.values()):
            cache[targets, :, :length] = cache[sources, :, :length]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: columns past a row's end are masked, but a mask does not hide a NaN in a value.
        return like.new_zeros(self._size[0], like.shape[1], self._size[1], like.shape[3])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [R, heads, new tokens, dim]
    key: torch.Tensor,  # [R, kv heads, length, dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [R, 1, 1, length] bool, True: attend; None: all (decoding) or causal (prefill)
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Return attention outputs [R, new tokens, heads, dim].

    Raises NotImplementedError for attention that is not plain and full.
    """
    if softcap is not None or s_aux is not None or (sliding_window is not None and key.shape[2] > sliding_window):
        raise NotImplementedError(
            "attention: the transformers backend has no soft caps, attention sinks or sliding windows."
            " Try policy.generation.backend=vllm."
        )

    rows, heads, tokens, _ = query.shape
    if tokens > 1:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1])
        return out.transpose(1, 2), None
    # Treat the query heads that share a kv head as its query tokens, so that keys and values are never repeated.
    query = query.reshape(rows, key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, out.shape[3]), None


AttentionInterface.register(ATTENTION, attention)
