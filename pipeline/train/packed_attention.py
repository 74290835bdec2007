"""Register packed attention with transformers, as the attention implementation `packed`.

transformers passes the model's keyword arguments to its attention function. The packing is passed this way, so no mask is
built. A model that asks for the mask of a window or of chunks gets a `Local` instead, which it passes to its layers. So each
layer has the kind of attention that the mask of transformers' eager attention would give it.

Not supported, with an error: other masks, caches, attention dropout, biases of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pipeline.train.attention import AttentionKind, attend
from pipeline.train.sequence_bounds import Packing

NAME = "packed"  # value of a model's `attn_implementation`

# Keywords that models pass and that have no effect here: queries and keys already contain the positions, the policy is always
# in evaluation mode without dropout, the layer number is informative only, and indexers choose all keys (`indexers.py`).
_WITHOUT_EFFECT = {"position_ids", "position_embeddings", "dropout", "layer_idx", "indices"}


@dataclass(frozen=True, slots=True)
class Local:
    """Stands for the mask of a causal window or of causal chunks."""

    window: int | None = None
    chunk: int | None = None

    def __getitem__(self, _: Any) -> Local:
        """Return the same, as the part of a mask that an indexer gets."""
        return self


def packed_mask(
    *args: Any,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Local | None:
    """Return the value that stands for a mask in transformers' interface: None for a plain causal mask, else a `Local`.

    allow_is_causal_skip: False if the model needs a mask even if it is plain.
    Raises ValueError for masks that packed attention does not support.
    """
    united = getattr(mask_function, "__qualname__", "").startswith("or_masks")
    if attention_mask is not None or use_vmap or united or "allow_is_bidirectional_skip" in kwargs:
        raise ValueError("packed attention supports causal masks only, with windows or chunks")
    if local_size is None:
        return None if allow_is_causal_skip else Local()
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if window is not None and chunk is not None:
        raise ValueError(f"the configuration has both sliding_window {window} and attention_chunk_size {chunk}")
    return Local(window=local_size) if chunk is None else Local(chunk=local_size)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Local | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    use_cache: bool | None = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in transformers' interface.

    query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, D], None).

    sliding_window: must equal the mask's window if a sequence is longer; transformers' eager attention ignores it. s_aux [Hq]:
    sinks. Raises ValueError for arguments that are not supported.
    """
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} did not pass `packing` to attention; its model cannot run on packed sequences"
        )
    unknown = sorted(
        n for n, argument in kwargs.items() if argument is not None and argument is not False and n not in _WITHOUT_EFFECT
    )
    masked = attention_mask is not None and not isinstance(attention_mask, Local)
    if masked or use_cache or unknown or not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} uses what packed attention does not support: mask {masked}, cache {bool(use_cache)},"
            f" causal {getattr(module, 'is_causal', True)}, other arguments {unknown}"
        )
    local = attention_mask or Local()
    if sliding_window is not None and sliding_window < packing.max_length and sliding_window != local.window:
        raise ValueError(f"{type(module).__name__} has sliding_window {sliding_window}, but its mask has {local.window}")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    kind = AttentionKind(scaling, local.window, softcap, local.chunk)
    return attend(query, key, value, packing, kind, s_aux)[None], None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
