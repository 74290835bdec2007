"""Choose the precision in which a tensor is sent and exported: the policy's, or float32 for a few tensors.

The bias that balances the load of DeepSeek's experts decides between scores with small differences, so a rounded bias would
select other experts. The trainer, transformers and vLLM all keep it in float32. Exports and the refit therefore do so too.

Not listed: tensors that only one of these three keeps in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FLOAT32 = "e_score_correction_bias"


def served_dtype(name: str, precision: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is sent and exported. name: its name on disk. precision: the policy's dtype."""
    import torch  # needs torch, which submission may lack

    return torch.float32 if name.endswith(_FLOAT32) else precision


def served_bytes(name: str, itemsize: int) -> int:
    """Return the bytes of one entry of a tensor when it is sent. itemsize: bytes in the policy's precision."""
    return 4 if name.endswith(_FLOAT32) else itemsize
