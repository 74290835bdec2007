"""Find the layers that get adapters in the FSDP2 backend, and the adapters that engines cannot serve.

The layers follow from the tensors that transformers describes.

transformers keeps the experts of a layer in `gate_up_proj` (`up_proj` without a gate) and `down_proj`, whatever their names on
disk are.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.config import LoRAConfig, Problem
from pipeline.models.tensors import Tensor
from pipeline.train.adapters.spec import in_transformers

KEY = "policy.generation.lora_refit"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
FOLDED = "kv_b_proj"
"""The layer of multi-latent attention whose weight vLLM splits into W_UK and W_UV when it loads it."""
UNEQUAL = ("gpt_oss",)
"""Families for which vLLM's LoRA gives other tokens than merged weights: see tests/generate/test_vllm_adapter_families.py."""
_JOINED = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class DescribedExperts:
    """A parameter in which transformers stacks one weight of all experts of a layer."""

    name: str  # in transformers: model.layers.0.mlp.experts.gate_up_proj
    experts: int
    rows: int  # out, of one expert
    columns: int  # in


def experts(tensors: Iterable[Tensor]) -> list[DescribedExperts]:
    """Return the parameters in which transformers stacks the routed experts. tensors: the model's tensors on disk."""
    sizes: dict[str, tuple[int, int, int]] = {}
    routed = [tensor for tensor in tensors if tensor.part == "routed"]
    gated = any(re.search(r"\.(gate_proj|w1)\.weight$", tensor.name) for tensor in routed)
    for tensor in routed:
        if len(tensor.shape) == 3:  # of all experts, as in memory
            count, columns, rows = tensor.shape
            sizes[tensor.name] = count, rows, columns
        elif match := _EXPERT.fullmatch(tensor.name):
            kind = "gate_up_proj" if gated and match[3] == "up_proj" else _JOINED.get(match[3], match[3])
            name = f"{in_transformers(match[1])}.{kind}"
            count, rows, columns = sizes.get(name, (0, 0, tensor.shape[1]))
            first = int(match[2]) == 0
            sizes[name] = max(count, int(match[2]) + 1), rows + (tensor.shape[0] if first else 0), columns
    return [DescribedExperts(name, *of) for name, of in sizes.items()]


def is_adapted(layer: str, config: LoRAConfig) -> bool:
    """Return whether `config` gives a layer an adapter. layer: transformers' name of a layer that can have an adapter."""

    def among(names: Iterable[str]) -> bool:
        return any(layer == name or layer.endswith(f".{name}") or fnmatch.fnmatchcase(layer, name) for name in names)

    return (config.match_all_linear or among(config.target_modules)) and not among(config.exclude_modules)


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
