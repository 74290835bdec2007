"""The layers on disk that Megatron-Core's adapted modules consist of, and the tensors of their adapters. Needs no torch.

Train ranks, engines and plans all take the names, the shapes and the order of a model's adapters from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from pipeline.config import LoRAConfig, MegatronLoRAConfig, Problem
from pipeline.models.family import Parameter
from pipeline.train.adapters.adapted_layers import not_served
from pipeline.train.adapters.modules import KEY, ChosenModule, expert_of
from pipeline.train.adapters.spec import AdapterSpec, in_transformers

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AdaptedModule:
    """A Megatron-Core module that gets adapters, described as a whole and not as one rank's part."""

    module: str  # global name in Megatron-Core: decoder.layers.3.self_attention.linear_qkv
    weight: Parameter  # of the module
    layers: tuple[str | None, ...]  # the adapter's layer on disk for each source of W; None: the source gets none
    shared: bool  # one A for all layers
    rows: tuple[int, ...]  # rows of each layer's B

    @classmethod
    def of(cls, chosen: ChosenModule, shapes: Mapping[str, Shape]) -> Self:
        """Return the description of a chosen module. shapes: {name: shape} of the model's tensors on disk."""
        weight, sources = chosen.weight, chosen.weight.sources
        layers = [source.removesuffix(".weight") for source in sources]
        rows = tuple(shapes[source][0] for source in sources)
        shared = "own" not in chosen.choices
        if weight.expert is not None and shared:
            return cls(chosen.name, weight, (_expert_layer(layers),), True, (sum(rows),))
        adapted = tuple(layer if is_chosen else None for layer, is_chosen in zip(layers, chosen.choices, strict=True))
        return cls(chosen.name, weight, adapted, shared, rows)

    @property
    def names(self) -> list[str]:
        """The names of the layers on disk that get adapters."""
        return [layer for layer in self.layers if layer is not None]

    def tensors(self, spec: AdapterSpec, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return {name on disk: shape} of the adapters' tensors. shapes: {name: shape} of the model's tensors on disk."""
        tensors, columns = {}, shapes[self.weight.sources[0]][1]
        for layer, rows in zip(self.layers, self.rows, strict=True):
            tensors |= spec.shapes(layer, rows, columns) if layer else {}
        return tensors


def options(config: MegatronLoRAConfig) -> LoRAConfig:
    """Return Megatron-Core's adapter options as a LoRAConfig, the form that both backends share."""
    return LoRAConfig(
        True,
        dim=config.dim,
        alpha=config.alpha,
        dropout=config.dropout,
        dropout_position=config.dropout_position,
        lora_A_init=config.lora_A_init_method,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )


def not_served_modules(chosen: list[ChosenModule]) -> Iterator[Problem]:
    """Yield a problem if refits must not send the adapters of these modules alone, as `adapted_layers.not_served` does."""

    def layers(experts: bool) -> Iterator[str]:
        for module in chosen:
            if (module.weight.expert is not None) == experts:
                pairs = zip(module.weight.sources, module.choices, strict=True)
                yield from (source.removesuffix(".weight") for source, choice in pairs if choice)

    return not_served(layers(experts=True), layers(experts=False), KEY, "linear_kv_up_proj")


def _expert_layer(layers: list[str]) -> str:
    """Return transformers' name of the adapted layer that stands for an expert's projections with a shared A.

    layers: the names of the projections on disk; Mixtral's and Nemotron-H's differ from transformers' names. A gate and an up
    projection together are gate_up_proj.
    """
    expert = expert_of(layers[0])
    assert expert is not None, f"{layers[0]} is not the name of an expert's layer"  # `choose` refuses it
    suffix = layers[0].rpartition(".")[2]
    kind = "gate_up_proj" if len(layers) > 1 else {"w2": "down_proj"}.get(suffix, suffix)
    return f"{in_transformers(expert)}.{kind}"
