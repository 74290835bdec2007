"""Check the choice of FSDP2's adapted layers against a model's config.json, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import LoRAConfig, Problem
from pipeline.models.sizes import MODEL_TYPES
from pipeline.models.tensors import tensors

KEY = "policy.dtensor_cfg.lora_cfg"
ADAPTED = ("attention", "mlp", "shared")
HEADS = ("lm_head", "score")


def problems(config: LoRAConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems of names that end like no linear layer of the model, and of all layers where some cannot have adapters.

    The job checks patterns with *, the other parts of a name, and families that are not in `MODEL_TYPES`.
    """
    if not config.enabled or model.get("model_type") not in MODEL_TYPES:
        return
    described = tensors(model)
    weights = [tensor for tensor in described if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    linear = {_layer(tensor.name) for tensor in weights if tensor.part in (*ADAPTED, "router")}
    shown = ", ".join(sorted({_layer(tensor.name) for tensor in weights if tensor.part in ADAPTED}))
    for key, allowed in (("target_modules", linear), ("exclude_modules", linear.union(HEADS))):
        for name in getattr(config, key):
            if "*" not in name and name.rpartition(".")[2] not in allowed:
                message = f"got '{name}', which no linear layer of the model matches; expected some of: {shown}"
                yield Problem(f"{KEY}.{key}", "not-a-choice", message)
    if config.match_all_linear and any(tensor.part == "routed" or len(tensor.shape) > 2 for tensor in described):
        message = "got true for a model with experts or convolutions, which cannot have adapters; expected false"
        hint = f"Try false, with {KEY}.target_modules of these: {shown}"
        yield Problem(f"{KEY}.match_all_linear", "unsupported", f"{message}. {hint}")


def _layer(weight: str) -> str:
    """Return the last part of a layer's name: q_proj of model.layers.0.self_attn.q_proj.weight."""
    return weight.removesuffix(".weight").rpartition(".")[2]
