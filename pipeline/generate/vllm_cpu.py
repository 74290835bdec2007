"""Expert parallelism on a CPU, which vLLM 0.32 lacks.

Its CPU kernel for mixtures of experts takes a token's experts by their numbers in the whole model, also where a rank holds only
some of them, and so reads past the end of its weights.
"""

from __future__ import annotations

import functools

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def spread_experts() -> None:
    """Have the kernel called with each rank's own numbers of its experts. Once per process."""
    CPUUnquantizedExperts.apply = _with_local_numbers(CPUUnquantizedExperts.apply)


def _with_local_numbers(apply):
    @functools.wraps(apply)
    def mended(self, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **others) -> None:
        """expert_map: [experts of the model] int32, the number here of each, -1 for those of other ranks."""
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    return mended
