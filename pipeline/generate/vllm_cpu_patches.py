"""Patches for faults of vLLM 0.32 on a CPU.

Expert parallelism: vLLM's kernel for mixtures of experts indexes a token's experts by their numbers in the whole model. On a
rank that holds only some of the experts it so reads past the end of its weights. The patch maps the numbers.

Adapters: if any layer of a model has LoRA, its mixtures of experts use a Triton kernel, which CPUs do not have. Here experts
never have adapters (`vllm_adapters`), so the patch gives them the kernel that they use without LoRA.

Speculative decoding: on GPUs a Triton kernel copies the temperature, top_p and top_k of a request to each of its drafted
tokens. vLLM's replacement on a CPU writes them into a copy, so the values in use are uninitialised memory. The patch writes
them in place. Also, once numba is loaded (it finds n-grams), no further engine of the process completes the search for Triton
kernels. The patch runs the search only once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


def patch() -> None:
    """Apply all patches. Call it once per process, before an engine exists."""
    CPUUnquantizedExperts.apply = _with_local_numbers(CPUUnquantizedExperts.apply)
    FusedMoEConfig.__post_init__ = _without_adapters(FusedMoEConfig.__post_init__)  # pyright: ignore[reportAttributeAccessIssue]
    cpu_triton_utils._expand_kernel_impl = _expand
    platform = type(current_platform)
    platform.register_triton_kernel_overrides = staticmethod(functools.cache(platform.register_triton_kernel_overrides))


def _with_local_numbers(apply: Callable[..., None]) -> Callable[..., None]:
    """Return `apply` with expert numbers mapped to this rank's own."""

    @functools.wraps(apply)
    def apply_local(
        self, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **options
    ) -> None:
        """Apply the experts of this rank.

        expert_map: [experts of the model] int32: an expert's number on this rank; -1 for experts of other ranks.
        """
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **options)

    return apply_local


def _without_adapters(post_init: Callable[..., None]) -> Callable[..., None]:
    """Return `post_init` of the experts' configuration, changed to treat the experts as having no adapters."""

    @functools.wraps(post_init)
    def post_init_without_adapters(self) -> None:
        self.is_lora_enabled = False
        post_init(self)

    return post_init_without_adapters


def _expand(
    output: torch.Tensor,  # [tokens]
    values: torch.Tensor,  # [requests]
    cu_num_tokens: torch.Tensor,  # [requests]: number of tokens up to the end of each
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's entry of `values` to all of the request's tokens in `output`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts.long()))
