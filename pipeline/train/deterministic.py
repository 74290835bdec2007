"""Turn on the switches of policy.deterministic in this process. `pipeline/config/determinism.py` has the other switches."""

from __future__ import annotations

import torch
import torch.utils.deterministic


def switch_on() -> None:
    """Use torch's deterministic kernels from now on, in all models of the process.

    An operator that has no deterministic kernel raises an error. With warn_only, which only warns, torch's attention would keep
    the backward pass that adds atomically (attention_backward.cu, "To explicitly enable determinism"). The same switch sets
    Inductor's deterministic mode, the choice of cuDNN's convolutions, and the branches of Megatron-Core that sum by index
    (megatron/core/transformer/moe/moe_utils.py).
    """
    torch.use_deterministic_algorithms(True)
    # Otherwise every torch.empty would be filled, so that reading it before writing shows. That costs memory bandwidth.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of the module's class
