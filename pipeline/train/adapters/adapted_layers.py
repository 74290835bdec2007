"""The layers that FSDP2's adapters adapt, from the tensors that config.json describes, and those that engines cannot serve.

Needs no torch.

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
"""Families of which vLLM's LoRA gives other tokens than merged weights: tests/generate/test_vllm_adapter_families.py."""
_JOINED = {"gate_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class DescribedExperts:
    """One parameter of all experts of a layer."""

    name: str  # in transformers: model.layers.0.mlp.experts.gate_up_proj
    experts: int
    rows: int  # out, of one expert
    columns: int  # in


def experts(tensors: Iterable[Tensor]) -> list[DescribedExperts]:
    """Return the parameters of experts. tensors: the model's, on disk."""
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
    """Return whether a layer of this name in transformers, which can have an adapter, has one."""

    def among(names: Iterable[str]) -> bool:
        return any(layer == name or layer.endswith(f".{name}") or fnmatch.fnmatchcase(layer, name) for name in names)

    return (config.match_all_linear or among(config.target_modules)) and not among(config.exclude_modules)


def expert_entries(tensors: Iterable[Tensor], config: LoRAConfig) -> int:
    """Return the number of entries of A and B of all experts."""
    adapted = [layer for layer in experts(tensors) if is_adapted(layer.name, config)]
    return config.dim * sum(layer.experts * (layer.rows + layer.columns) for layer in adapted)


def family_not_served(model_type: str | None) -> Iterator[Problem]:
    """Yield the problem of a refit of adapters alone if vLLM serves those of this family wrongly."""
    if model_type in UNEQUAL:
        message = f"got adapter for {model_type}, whose LoRA in vLLM differs from merged weights; expected merged"
        yield Problem(KEY, "unsupported", f"{message}. Try {KEY}=merged")


def not_served(
    experts: Iterable[str], linear: Iterable[str], key: str = "policy.dtensor_cfg.lora_cfg", folded: str = FOLDED
) -> Iterator[Problem]:
    """Yield the problem of a refit of adapters alone if engines cannot apply all of them.

    experts, linear: the layers that have adapters, by their names on disk. key: of the adapters' section. folded: its name of
    FOLDED.
    """
    if (expert := next(iter(experts), None)) is not None:
        why, left_out = f"experts ({expert}); expected merged, since engines are sent those of linear layers alone", "experts"
    elif (layer := next((layer for layer in linear if layer.endswith(f".{FOLDED}")), None)) is not None:
        why, left_out = f"{layer}; expected merged, since vLLM takes its weight apart once, without adapters", folded
    else:
        return
    message = f"got adapter with adapters of {why}. Try merged, or {key}.target_modules without {left_out}"
    yield Problem(KEY, "unsupported", message)
