"""Say which layers get adapters in the FSDP2 backend by a recipe's names, and which adapters engines cannot serve.

Needs no torch, so that submission and plans can ask too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from pipeline.config import LoRAConfig, Problem

KEY = "policy.generation.lora_refit"
FOLDED = "kv_b_proj"
"""The layer of multi-latent attention whose weight vLLM splits into W_UK and W_UV when it loads it."""
UNEQUAL = ("gpt_oss", "gemma4_text")
"""Families for which vLLM's LoRA gives other tokens than merged weights: see tests/generate/test_vllm_adapter_families.py.
Values of Gemma 4 that are projected keys would lack the keys' adapter."""


def is_named(layer: str, names: Iterable[str]) -> bool:
    """Return whether a name in a recipe selects a layer. layer: transformers' name of a layer that can have an adapter."""
    return any(layer == name or layer.endswith(f".{name}") or fnmatch.fnmatchcase(layer, name) for name in names)


def is_adapted(layer: str, config: LoRAConfig) -> bool:
    """Return whether `config` gives a layer an adapter. layer: transformers' name of a layer that can have an adapter."""
    return (config.match_all_linear or is_named(layer, config.target_modules)) and not is_named(layer, config.exclude_modules)


def family_not_served(model_type: str | None) -> Iterator[Problem]:
    """Yield a problem if refits must not send adapters alone because vLLM applies adapters of this model family wrongly."""
    if model_type in UNEQUAL:
        message = f"got adapter for {model_type}, whose LoRA in vLLM differs from merged weights; expected merged"
        yield Problem(KEY, "unsupported", f"{message}. Try {KEY}=merged")


def not_served(
    experts: Iterable[str], linear: Iterable[str], key: str = "policy.dtensor_cfg.lora_cfg", folded: str = FOLDED
) -> Iterator[Problem]:
    """Yield a problem if refits must not send adapters alone because engines cannot apply all of them.

    experts, linear: the names of the experts' layers and of the linear layers that have adapters. key: the recipe's section of
    adapters. folded: the name by which this section's target_modules select the layer FOLDED.
    """
    if (expert := next(iter(experts), None)) is not None:
        why, left_out = f"experts ({expert}); expected merged, since engines get only the adapters of linear layers", "experts"
    elif (layer := next((layer for layer in linear if layer.endswith(f".{FOLDED}")), None)) is not None:
        why, left_out = f"{layer}; expected merged, since vLLM splits its weight when it loads it, without adapters", folded
    else:
        return
    message = f"got adapter with adapters of {why}. Try merged, or {key}.target_modules without {left_out}"
    yield Problem(KEY, "unsupported", message)
