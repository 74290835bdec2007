"""Read the adapters in a checkpoint: which weights on disk they adapt, and the merged weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.boxes import Piece, whole
from pipeline.config import LoRAConfig
from pipeline.models.hugging_face import layout
from pipeline.models.recorded_layout import Shape, invert
from pipeline.train.adapters import adapter_weights
from pipeline.train.adapters.adapted_experts import ExpertParameter, expert_parameters, parameter_of
from pipeline.train.adapters.spec import PREFIX, A, AdapterSpec, B
from pipeline.train.shards import BoxReader


class SavedAdapters:
    """The adapters in a checkpoint of a model."""

    def __init__(self, reader: BoxReader, record: Mapping[str, Any], hf: PreTrainedModel):
        """record: the checkpoint's record of its adapters. hf: the recipe's model, on the meta device.

        The checkpoint may be of another model: see `weights`.
        """
        names = ("dim", "alpha", "use_dora", "use_rslora")  # options that only training uses have their defaults
        self.spec = AdapterSpec.of(LoRAConfig(True, **{name: record[name] for name in names if name in record}))
        self._reader = reader
        self._experts = expert_parameters(hf)
        self.layers: dict[str, Shape] = {}  # {layer that has an adapter: [out, in]}
        for name, shape in reader.shapes.items():
            if name.startswith(PREFIX) and name.endswith(A):
                layer = name.removeprefix(PREFIX).removesuffix(A)
                self.layers[layer] = (reader.shapes[PREFIX + layer + B][0], shape[1])
        # Of each weight on disk that consists of experts: its boxes of parameters in memory.
        parts = {name: pieces for name, pieces in layout(hf).items() if name in self._experts} if self._experts else {}
        self._parts: dict[str, list[Piece]] = invert(parts)

    @property
    def mixture(self) -> bool:
        """Return whether the model is a mixture of experts."""
        return bool(self._experts)

    def of_experts(self) -> dict[str, ExpertParameter]:
        """Return {parameter in memory: its description} of the experts' parameters in which an expert has an adapter.

        Adapters of a part of an expert's rows (gate_proj alone, with its own A) do not count.
        """
        parameters = {match[0] for layer in self.layers if (match := parameter_of(layer))}
        return {name: parameter for name, parameter in self._experts.items() if name in parameters}

    def weights(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return {weight on disk: shape} of the adapted weights. shapes: {name: shape} of the model's tensors on disk.

        A layer that the model lacks, or has with another shape, is returned under the layer's own name with its adapter's
        shape. So the caller sees it as a difference from `shapes`.
        """
        tensors: dict[str, Shape] = {}
        adapted: dict[str, set[int]] = {}
        for layer, shape in self.layers.items():
            name, expert = parameter_of(layer) or ("", 0)
            if (parameter := self._experts.get(name)) is None:
                tensors[f"{layer}.weight"] = shape
            elif shape != (parameter.rows, parameter.columns) or expert >= parameter.experts:
                tensors[layer] = shape
            else:
                adapted.setdefault(name, set()).add(expert)
        for stored, pieces in self._parts.items():
            if any(not adapted.get(piece.name, set()).isdisjoint(_experts(piece)) for piece in pieces):
                tensors[stored] = shapes[stored]
        return tensors

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a whole weight on disk, merged with its adapters. name: a key of `weights`; weight: the base weight."""
        layer = name.removesuffix(".weight")
        if layer in self.layers and (parameter_of(layer) or ("",))[0] not in self._experts:
            return self._merge(layer, weight, slice(None), slice(None))
        merged = weight.clone()
        for piece in self._parts[name]:
            parameter, box = self._experts[piece.name], piece.target.within(whole(tuple(weight.shape)))
            part = merged[box].reshape(piece.source.size)
            for matrix, expert in zip(part, _experts(piece), strict=True):
                if (layer := parameter.layer(expert)) in self.layers:
                    oriented = matrix.T if parameter.transposed else matrix
                    oriented.copy_(self._merge(layer, oriented, *parameter.part(piece.source)))
            merged[box] = part.reshape(piece.target.size)
        return merged

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor of an adapter by its name, such as `<layer>.lora_A.weight`."""
        return self._reader.read(PREFIX + name, whole(self._reader.shapes[PREFIX + name]))

    def _merge(self, layer: str, weight: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Return these rows and columns of a layer's weight, merged with its adapter. weight: this part of the base weight."""
        a, b, *magnitude = (self.read(stored) for stored in self.spec.shapes(layer, *self.layers[layer]))
        part = a[:, columns]
        assert not magnitude or part.shape == a.shape, f"{layer}: the norms of DoRA need whole rows"
        return adapter_weights.merge(weight, part, b[rows], self.spec.scale, magnitude[0][rows] if magnitude else None)


def _experts(piece: Piece) -> range:
    """Return the numbers of the experts in a piece's box of a parameter in memory."""
    return range(piece.source.offset[0], piece.source.offset[0] + piece.source.size[0])
