"""Which tensors keep float32, whatever the policy's precision.

The bias that balances DeepSeek's experts chooses them by small differences between scores; rounded, it chooses others. The
trainer, transformers and vLLM all keep it in float32, and so do the exports and everything between the components.

Left out: what one of them alone keeps so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FLOAT32 = "e_score_correction_bias"


def served_dtype(name: str, precision: torch.dtype) -> torch.dtype:
    """Of a tensor on disk, in which it is sent and exported. precision: the policy's."""
    import torch

    return torch.float32 if name.endswith(_FLOAT32) else precision


def served_bytes(name: str, itemsize: int) -> int:
    """Of an entry of it. itemsize: of the policy's precision."""
    return 4 if name.endswith(_FLOAT32) else itemsize
