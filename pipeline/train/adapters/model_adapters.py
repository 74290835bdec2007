"""The adapters that a model of the FSDP2 backend holds: their names on disk, initial values and merged weights.

A `LinearAdapter` belongs to a linear layer, an `ExpertsAdapter` to a parameter that stacks all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from pipeline.boxes import Box, Piece, whole
from pipeline.train.adapters import adapter_weights, spec
from pipeline.train.adapters.fused_experts import ExpertParameter
from pipeline.train.adapters.linear import AdaptedLinear
from pipeline.train.adapters.spec import AdapterSpec
from pipeline.train.shards import gather_full, local, local_box

Parameters = Mapping[str, nn.Parameter]
"""{name in memory: parameter} of a model."""


class Adapter(Protocol):
    """The adapter of one parameter W in memory."""

    @property
    def weight(self) -> str:
        """The name of W in memory."""
        ...

    def shapes(self, of: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Return {name on disk: shape} of the adapter's whole tensors."""
        ...

    def layout(self, of: AdapterSpec) -> dict[str, list[Piece]]:
        """Return {parameter in memory: the pieces of tensors on disk that it consists of} of the adapter."""
        ...

    def initialize(self, of: AdapterSpec, parameters: Parameters, seed: int) -> None:
        """Set this rank's part of the adapter to its initial values. W must be loaded before. Collective with DoRA."""
        ...

    def merged(self, of: AdapterSpec, parameters: Parameters, device: torch.device) -> torch.Tensor:
        """Return this rank's part of W, merged with the adapter on `device`. Collective."""
        ...


@dataclass(frozen=True)
class LinearAdapter:
    """The adapter of one linear layer."""

    stored: str  # the layer's name on disk
    layer: AdaptedLinear
    size: tuple[int, int]  # of the whole W
    weight: str  # names of parameters in memory: W [out, in]
    a: str  # A [dim, in]
    b: str  # B [out, dim]
    magnitude: str | None  # m [out], with DoRA

    def shapes(self, of: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Return {name on disk: shape} of the adapter's whole tensors."""
        return of.shapes(self.stored, *self.size)

    def layout(self, of: AdapterSpec) -> dict[str, list[Piece]]:
        """Return {parameter in memory: its tensor on disk, as one piece}."""
        names = [name for name in (self.a, self.b, self.magnitude) if name]
        stored = self.shapes(of).items()
        return {name: [Piece(source, whole(shape), whole(shape))] for name, (source, shape) in zip(names, stored, strict=True)}

    def initialize(self, of: AdapterSpec, parameters: Parameters, seed: int) -> None:
        """Set this rank's part of the adapter to its initial values."""
        a, b = parameters[self.a], parameters[self.b]
        drawn = adapter_weights.initial_a(of, self.stored, a.shape[1], seed)
        local(a).copy_(drawn[local_box(a).within(whole(tuple(a.shape)))])
        local(b).zero_()
        if self.magnitude:
            # fully_shard cuts the magnitudes into the same rows as W.
            norms = adapter_weights.initial_magnitude(local(parameters[self.weight]), self.layer.sum_columns)
            local(parameters[self.magnitude]).copy_(norms)

    def merged(self, of: AdapterSpec, parameters: Parameters, device: torch.device) -> torch.Tensor:
        """Return this rank's part of W, merged with the adapter on `device`."""
        weight = parameters[self.weight]
        rows, columns = local_box(weight).within(whole(tuple(weight.shape)))
        a, b = (_whole(parameters[name], device) for name in (self.a, self.b))
        magnitude = _whole(parameters[self.magnitude], device)[rows] if self.magnitude else None
        options = (of.scale, magnitude, self.layer.sum_columns)
        return adapter_weights.merge(local(weight).to(device), a[:, columns], b[rows], *options)


@dataclass(frozen=True)
class ExpertsAdapter:
    """The adapters of a parameter W that stacks all experts of a layer. A rank holds those of the experts in its part of W."""

    parameter: ExpertParameter
    a: str  # names of parameters in memory: A [E, dim, in]
    b: str  # B [E, out, dim]
    magnitude: str | None  # m [E, out], with DoRA

    @property
    def weight(self) -> str:
        """The name of W in memory."""
        return self.parameter.name

    def shapes(self, of: AdapterSpec) -> dict[str, tuple[int, ...]]:
        """Return {name on disk: shape} of the adapters' tensors of all experts."""
        shapes = {}
        for expert in range(self.parameter.experts):
            shapes |= of.shapes(self.parameter.layer(expert), self.parameter.rows, self.parameter.columns)
        return shapes

    def layout(self, of: AdapterSpec) -> dict[str, list[Piece]]:
        """Return {parameter in memory: the tensors on disk that it consists of}."""
        shapes = self.shapes(of)
        suffixes = {self.a: spec.A, self.b: spec.B} | ({self.magnitude: spec.MAGNITUDE} if self.magnitude else {})
        pieces: dict[str, list[Piece]] = {}
        for name, suffix in suffixes.items():
            for expert in range(self.parameter.experts):
                stored_name = self.parameter.layer(expert) + suffix
                box = Box((expert, *(0 for _ in shapes[stored_name])), (1, *shapes[stored_name]))
                pieces.setdefault(name, []).append(Piece(stored_name, whole(shapes[stored_name]), box))
        return pieces

    def initialize(self, of: AdapterSpec, parameters: Parameters, seed: int) -> None:
        """Set this rank's part of the adapter to its initial values."""
        a, magnitude = local(parameters[self.a]), local(parameters[self.magnitude]) if self.magnitude else None
        first = local_box(parameters[self.a]).offset[0]
        for i, weight in enumerate(self._experts(parameters)):
            a[i].copy_(adapter_weights.initial_a(of, self.parameter.layer(first + i), self.parameter.columns, seed))
            if magnitude is not None:
                magnitude[i].copy_(adapter_weights.initial_magnitude(weight))
        local(parameters[self.b]).zero_()

    def merged(self, of: AdapterSpec, parameters: Parameters, device: torch.device) -> torch.Tensor:
        """Return this rank's part of W, merged one expert at a time. Its dimensions are in the order of the parameter."""
        merged = torch.empty_like(local(parameters[self.weight]), device=device)
        a, b = (local(parameters[name]) for name in (self.a, self.b))
        magnitudes = local(parameters[self.magnitude]) if self.magnitude else [None] * len(a)
        for i, (weight, magnitude) in enumerate(zip(self._experts(parameters), magnitudes, strict=True)):
            factors = (a[i].to(device), b[i].to(device), of.scale, None if magnitude is None else magnitude.to(device))
            matrix = adapter_weights.merge(weight.to(device), *factors)
            merged[i].copy_(matrix.T if self.parameter.transposed else matrix)
        return merged

    def _experts(self, parameters: Parameters) -> Iterator[torch.Tensor]:
        """Yield W [out, in] of each expert that this rank holds."""
        for weight in local(parameters[self.weight]):
            yield weight.T if self.parameter.transposed else weight


def _whole(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    return gather_full(parameter, local(parameter).to(device))
