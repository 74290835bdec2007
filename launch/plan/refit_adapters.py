"""The tensors of a refit that delivers FSDP2's adapters alone (policy.generation.lora_refit=adapter), from the recipe."""

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


def adapter_tensors(found: Iterable[Tensor], config: LoRAConfig) -> list[Tensor]:
    """Return A and B of each adapted layer, with their tensor-parallel cuts. found: the model's tensors.

    Raises RecipeError for adapters that engines cannot apply.
    """
    spec, found, tensors = AdapterSpec.of(config), list(found), []
    layers = {tensor.name.removesuffix(".weight"): tensor for tensor in found if tensor.part in LINEAR}
    layers = {layer: one for layer, one in layers.items() if len(one.shape) == 2 and is_adapted(layer, config)}
    refuse(not_served([one.name for one in experts(found) if is_adapted(one.name, config)], layers))
    for layer, tensor in layers.items():
        shapes = spec.shapes(layer, *tensor.shape)
        cuts: dict[str, Split] = {layer + A: "columns", layer + B: "rows"}
        for name, split in cuts.items():
            cut: Split = split if tensor.split == split else "none"
            tensors.append(Tensor(name, shapes[name], tensor.part, cut, tensor.layer))
    return tensors


def received(tensors: Iterable[Tensor]) -> Iterator[tuple[str, str, Box]]:
    """Yield (unit, tensor, box) of a rank of an engine."""
    for tensor in tensors:
        yield UNIT, tensor.name, whole(tensor.shape)
