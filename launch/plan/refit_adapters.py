"""Compute, from the recipe, the tensors of a refit that transfers only FSDP2's adapters (generation.lora_refit=adapter)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.boxes import Box, whole
from pipeline.config import LoRAConfig, refuse
from pipeline.models.family import Split
from pipeline.models.tensors import Tensor
from pipeline.train.adapters.adapted_layers import experts, is_adapted, not_served
from pipeline.train.adapters.spec import A, AdapterSpec, B

LINEAR = ("attention", "mlp", "shared")  # parts of a model with linear layers, whose adapters engines can serve
UNIT = "adapters"  # of an engine, which gets every adapter whole


def adapter_tensors(model_tensors: Iterable[Tensor], config: LoRAConfig) -> list[Tensor]:
    """Return A and B of each adapted layer, with their tensor-parallel cuts.

    Raises RecipeError for adapters that engines cannot apply.
    """
    spec, model_tensors, tensors = AdapterSpec.of(config), list(model_tensors), []
    layers = {tensor.name.removesuffix(".weight"): tensor for tensor in model_tensors if tensor.part in LINEAR}
    layers = {layer: tensor for layer, tensor in layers.items() if len(tensor.shape) == 2 and is_adapted(layer, config)}
    refuse(not_served([expert.name for expert in experts(model_tensors) if is_adapted(expert.name, config)], layers))
    for layer, tensor in layers.items():
        shapes = spec.shapes(layer, *tensor.shape)
        cuts: dict[str, Split] = {layer + A: "columns", layer + B: "rows"}
        for name, split in cuts.items():
            cut: Split = split if tensor.split == split else "none"
            tensors.append(Tensor(name, shapes[name], tensor.part, cut, tensor.layer))
    return tensors


def received_boxes(tensors: Iterable[Tensor]) -> Iterator[tuple[str, str, Box]]:
    """Yield (unit, tensor, box) for each box that a rank of an engine receives."""
    for tensor in tensors:
        yield UNIT, tensor.name, whole(tensor.shape)
