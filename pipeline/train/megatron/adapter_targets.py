"""Describe the adapters of Megatron-Core's modules as functions of Hugging Face tensors.

Megatron-Core fuses projections: linear_qkv, and linear_fc1 of a gated MLP. B of a fused module consists of the B of each
projection, placed like the rows of W. For A there are two cases. With the targets linear_qkv and linear_fc1, the projections
share one A, which is stored once for each projection (as in LoRA of NVIDIA's Megatron-Bridge). With the targets linear_q,
linear_fc1_gate and so on, each projection has its own A, and these are stacked in one parameter (as in its CanonicalLoRA). The
two projections of an expert that share A are one layer, `gate_up_proj`, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from pipeline.config import MegatronLoRAConfig
from pipeline.models.decoder import identity
from pipeline.models.family import Parameter
from pipeline.models.recorded_layout import Shape, record
from pipeline.train.adapters.module_layers import AdaptedModule
from pipeline.train.adapters.modules import choose
from pipeline.train.adapters.spec import MAGNITUDE, A, AdapterSpec, B

SUBMODULE = "adapter"  # of the adapted module


class Target(AdaptedModule):
    """A module that gets adapters, with its parameters as functions of tensors on disk."""

    @property
    def stacked(self) -> int:
        """The number of A matrices [dim, in] in the module's parameter A."""
        return 1 if self.shared else len(self.names)

    def parameters(self, spec: AdapterSpec) -> dict[str, Parameter]:
        """Return {global name: parameter} of the whole adapter: A [stacked * dim, in], B [out, dim] and, with DoRA, m [out]."""
        split, expert = self.weight.split, self.weight.expert
        of_a = self.names[:1] if self.shared else self.names
        rows = partial(_rows, self.weight.function if len(self.layers) > 1 else identity, self._zeros())
        cut = "none" if split == "columns" else split
        columns = "columns" if split == "columns" else "none"
        name = f"{self.module}.{SUBMODULE}"
        parameters = {
            f"{name}.lora_A": Parameter(tuple(layer + A for layer in of_a), _stack, columns, expert),
            f"{name}.lora_B": Parameter(tuple(layer + B for layer in self.names), rows, cut, expert),
        }
        if spec.dora:
            parameters[f"{name}.magnitude"] = Parameter(tuple(layer + MAGNITUDE for layer in self.names), rows, cut, expert)
        return parameters

    def owners(self) -> list[int]:
        """Return, for each row of W [out, in], the number of its A matrix; -1 for a row without an adapter."""
        if self.shared or len(self.layers) == 1:
            return [0] * sum(self.rows)
        shape, pieces = record(self.weight.function, [(str(i), (count,)) for i, count in enumerate(self.rows)])
        adapted = [i for i, layer in enumerate(self.layers) if layer is not None]
        owners = [-1] * shape[0]
        for piece in pieces:
            if int(piece.name) in adapted:
                start = piece.target.offset[0]
                owners[start : start + piece.target.size[0]] = [adapted.index(int(piece.name))] * piece.target.size[0]
        return owners

    def duplicates(self) -> dict[str, list[str]]:
        """Return {name on disk of an A: the other names under which the same A is stored}."""
        first, *copies = self.names
        return {first + A: [layer + A for layer in copies]} if self.shared and copies else {}

    def _zeros(self) -> tuple[int | None, ...]:
        """Return, for each source of W, the number of its rows if it has no adapter, else None."""
        return tuple(count if layer is None else None for layer, count in zip(self.layers, self.rows, strict=True))


def _stack(*matrices: torch.Tensor) -> torch.Tensor:
    first, *tail = matrices
    return torch.cat(matrices) if tail else first


def _rows(function, zeros: tuple[int | None, ...], *sources: torch.Tensor) -> torch.Tensor:
    """Return `function` of one tensor for each source of W, such as the sources' B matrices.

    function: makes W from its sources. zeros: for each source, None if its tensor is the next of `sources`, else the number of
    rows of the zeros that replace it.
    """
    remaining = iter(sources)
    return function(*(next(remaining) if rows is None else sources[0].new_zeros(rows, *sources[0].shape[1:]) for rows in zeros))


def targets(config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], shapes: Mapping[str, Shape]) -> list[Target]:
    """Return the modules that get adapters, in the model's order.

    parameters: {global name: parameter} of the whole model. shapes: {name: shape} of the tensors on disk. Raises RecipeError as
    `choose` does.
    """
    return [Target.of(chosen, shapes) for chosen in choose(config, parameters)]
