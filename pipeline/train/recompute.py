"""Activation checkpointing of decoder layers: which activations the backward pass recomputes.

full: the backward pass recomputes all activations of a layer; only its input is kept. selective: the outputs of matrix products
and of attention are kept too, as in torchtitan's selective checkpointing of operators. Both run the same operations, so results
are bitwise equal. Grouped products of experts with biases are computed again: transformers adds biases to them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

# By name, because some exist on one device only. transformers' is for torch without a grouped product.
KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}


def recompute(layers: Iterable[nn.Module], granularity: str, draws: bool = False) -> None:
    """Checkpoint the forward of each layer, in place.

    granularity: "full" or "selective". draws: whether layers draw random numbers.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    for layer in layers:
        if granularity == "selective":
            biased = any(getattr(module, "has_bias", False) for module in layer.modules())
            options["context_fn"] = functools.partial(_contexts, KEPT if biased else KEPT | GROUPED)
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


class _OfKept(TorchDispatchMode):
    """Passes only the operators `kept` to a context of selective checkpointing.

    The context expects the recomputation to run the same operators as the forward pass. Hooks of `fully_shard` inside a layer,
    around its experts, run other operators in the recomputation, because the weights may have been gathered already.
    """

    def __init__(self, context: Any, kept: set[str]):
        super().__init__()
        self._context, self._kept = context, kept

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func._schema.name in self._kept:
            return self._context.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _contexts(kept: set[str]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return (the context of a layer's forward pass, the context of its recomputation)."""
    first, again = create_selective_checkpoint_contexts(_policy)
    return _OfKept(first, kept), _OfKept(again, kept)


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE
