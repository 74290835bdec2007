"""Check the choice of FSDP2's adapted layers against a model's config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import LoRAConfig, Problem
from pipeline.models.tensors import tensors
from pipeline.train.adapters.adapted_layers import experts, is_adapted, not_served

KEY = "policy.dtensor_cfg.lora_cfg"
ADAPTED = ("attention", "mlp", "shared")
HEADS = ("lm_head", "score")


def problems(config: LoRAConfig, model: Mapping[str, Any], served: bool = False) -> Iterator[Problem]:
    """Yield a problem for each name in the recipe that no adaptable layer has, and for adapters that engines cannot serve.

    served: whether refits send only the adapters to the engines. Only the last part of a dotted name is checked here. The job
    checks whole names and patterns with *. Imports torch and transformers if there are adapters.
    """
    if not config.enabled:
        return
    model_tensors = tensors(model)
    weights = [tensor for tensor in model_tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    routed = experts(model_tensors)
    kinds = {expert.name.rpartition(".")[2] for expert in routed}
    layers = {_layer(tensor.name) for tensor in weights if tensor.part in (*ADAPTED, "router")} | kinds
    names_text = ", ".join(sorted({_layer(tensor.name) for tensor in weights if tensor.part in ADAPTED} | kinds))
    for key, layer_names in (("target_modules", layers), ("exclude_modules", layers.union(HEADS))):
        for name in getattr(config, key):
            if "*" not in name and name.rpartition(".")[2] not in layer_names:
                message = f"got '{name}', which no layer of the model matches; expected some of: {names_text}"
                yield Problem(f"{KEY}.{key}", "not-a-choice", message)
    if served:
        linear = [tensor.name.removesuffix(".weight") for tensor in weights if tensor.part in ADAPTED]
        adapted = [expert.name for expert in routed if is_adapted(expert.name, config)]
        yield from not_served(adapted, [layer for layer in linear if is_adapted(layer, config)])


def _layer(weight: str) -> str:
    """Return the last part of the name of a weight's layer: model.layers.0.self_attn.q_proj.weight -> q_proj."""
    return weight.removesuffix(".weight").rpartition(".")[2]
