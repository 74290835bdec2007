"""Packed attention as transformers' attention implementation `packed`.

transformers passes the model's keyword arguments to its attention function. The packing is passed this way, so no mask is
built.

Not supported, with an error: sliding windows, soft caps, attention sinks, masks, caches, attention dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pipeline.train.attention import AttentionKind, attend
from pipeline.train.packing import Packing

NAME = "packed"  # value of a model's `attn_implementation`

# Keywords that models pass and that have no effect here: queries and keys already contain the positions, the policy is always
# in evaluation mode without dropout, and the layer number is informative only.
_WITHOUT_EFFECT = {"position_ids", "position_embeddings", "dropout", "layer_idx"}


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
    return attend(query, key, value, packing, AttentionKind(scaling))[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
