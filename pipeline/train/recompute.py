"""Activation checkpointing of decoder layers: which activations the backward pass recomputes.

full: the backward pass recomputes all activations of a layer; only its input is kept. selective: the outputs of matrix products
and of attention are kept too, as in torchtitan's selective checkpointing of operators. Both run the same operations, so results
are bitwise equal.
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

# By name, because some exist on one device only. transformers defines the last one, for torch without a grouped product.
KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "transformers::grouped_mm_fallback",
}


def recompute(layers: Iterable[nn.Module], granularity: str, draws: bool = False) -> None:
    """Checkpoint the forward of each layer, in place.

    granularity: "full" or "selective". draws: whether layers draw random numbers.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
    if granularity == "selective":
        options["context_fn"] = _contexts
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


class _OfKept(TorchDispatchMode):
    """Passes only the operators of KEPT to a context of selective checkpointing.

    The context expects the recomputation to run the same operators as the forward pass. Hooks of `fully_shard` inside a layer,
    around its experts, run other operators in the recomputation, because the weights may have been gathered already.
    """

    def __init__(self, context: Any):
        super().__init__()
        self._context = context

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if _is_kept(func):
            return self._context.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return (the context of a layer's forward pass, the context of its recomputation)."""
    first, again = create_selective_checkpoint_contexts(_policy)
    return _OfKept(first), _OfKept(again)


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _is_kept(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name in KEPT
