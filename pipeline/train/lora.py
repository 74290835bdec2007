"""The adapters of a model of the FSDP2 backend (`adapters/spec.py` defines them): which layers have one, and their weights.

Weights leave the backend merged, under the names of W; for a role that serves adapters, the adapters' own tensors leave it. A
checkpoint holds the adapters and a value head, without W: W is loaded from policy.model_name again. W without adapters is the
reference policy.

Routed experts are layers too: transformers keeps them in parameters of all experts, `gate_up_proj` and `down_proj`.

Not supported: adapters of embeddings, heads, routers and convolutions; trained biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.boxes import Box, Piece, whole
from pipeline.config import LoRAConfig, Problem, RecipeError, refuse
from pipeline.models.hugging_face import SCORE, other_modalities
from pipeline.train.adapters import adapted_experts, adapted_layers, adapter_weights, spec
from pipeline.train.adapters.adapted_experts import ExpertParameter, expert_parameters
from pipeline.train.adapters.adapted_layers import is_adapted, is_named
from pipeline.train.adapters.adapter_weights import KEY
from pipeline.train.adapters.linear import AdaptedLinear, AdapterSwitch
from pipeline.train.adapters.spec import AdapterSpec
from pipeline.train.indexers import is_indexer
from pipeline.train.shards import gather_full, local, local_box

Parameters = Mapping[str, nn.Parameter]
"""{name in memory: parameter} of a model."""


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

    def layout(self, of: AdapterSpec) -> dict[str, list[Piece]]:
        """Return {parameter in memory: its tensor on disk, as one piece}."""
        names, stored = (name for name in (self.a, self.b, self.magnitude) if name), of.shapes(self.stored, *self.size)
        boxes = ((source, whole(shape)) for source, shape in stored.items())
        return {name: [Piece(source, box, box)] for name, (source, box) in zip(names, boxes, strict=True)}

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

    def layout(self, of: AdapterSpec) -> dict[str, list[Piece]]:
        """Return {parameter in memory: the tensors on disk that it consists of}."""
        names = [name for name in (self.a, self.b, self.magnitude) if name]
        pieces: dict[str, list[Piece]] = {name: [] for name in names}
        for expert in range(self.parameter.experts):
            stored = of.shapes(self.parameter.layer(expert), self.parameter.rows, self.parameter.columns)
            for name, (source, shape) in zip(names, stored.items(), strict=True):
                pieces[name].append(Piece(source, whole(shape), Box((expert, *(0 for _ in shape)), (1, *shape))))
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


Adapter = LinearAdapter | ExpertsAdapter


@dataclass
class Adapters:
    """All adapters of a model."""

    spec: AdapterSpec
    items: list[Adapter] = field(default_factory=list)
    layout: dict[str, list[Piece]] = field(default_factory=dict)  # {name in memory: its pieces on disk}
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # on disk
    switch: AdapterSwitch = field(default_factory=AdapterSwitch)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter."""
        self.items.append(adapter)
        layout = adapter.layout(self.spec)
        self.layout |= layout
        self.shapes |= {piece.name: piece.source.size for pieces in layout.values() for piece in pieces}

    def initialize(self, parameters: Parameters, seed: int) -> None:
        """Set this rank's parts to their initial values, which are the same for every layout. W must be loaded before."""
        for adapter in self.items:
            adapter.initialize(self.spec, parameters, seed)


def inject(hf: PreTrainedModel, config: LoRAConfig, layout: dict[str, list[Piece]]) -> Adapters:
    """Add adapters in float32 to a model on the meta device. Only the adapters and a value head are trained then.

    layout: {parameter: its pieces} of the model; its keys are changed in place to the parameters' new names. Raises RecipeError
    if the recipe names a layer that cannot have an adapter.
    """
    if config.dim < 1:
        raise RecipeError(_problem("dim", "too-small", f"got {config.dim}; expected at least 1"))
    adapters, experts = Adapters(AdapterSpec.of(config)), expert_parameters(hf)
    modules = dict(hf.named_modules())
    heads = {name for name, module in modules.items() if module in (hf.get_output_embeddings(), getattr(hf, "score", None))}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in heads]
    unused = set(other_modalities(hf))
    linear = [name for name in linear if f"{name}.weight" not in unused and not is_indexer(name.rpartition(".")[0])]
    refuse(_wrong_names(hf, config, [*linear, *experts], heads, experts))
    targets = _targets(config, [*linear, *experts])
    hf.requires_grad_(False)
    of_experts: dict[str, list[str]] = {}
    for target in targets:
        if target in experts:
            module, _, kind = target.rpartition(".")
            of_experts.setdefault(module, []).append(kind)
        else:
            adapters.add(_adapt_linear(hf, target, adapters, layout))
    for module, kinds in of_experts.items():
        adapted_experts.adapt(hf.get_submodule(module), kinds, adapters.spec, adapters.switch)
        for kind in kinds:
            a, b, magnitude = (f"{module}.{name}" for name in adapted_experts.own_names(kind))
            adapters.add(ExpertsAdapter(experts[f"{module}.{kind}"], a, b, magnitude if adapters.spec.dora else None))
    if SCORE in layout:
        hf.get_submodule("score").float().requires_grad_(True)
    return adapters


def _adapt_linear(hf: PreTrainedModel, target: str, adapters: Adapters, layout: dict[str, list[Piece]]) -> LinearAdapter:
    """Replace a linear layer by an adapted one. layout: as for `inject`."""
    pieces, weight = layout[f"{target}.weight"], hf.get_parameter(f"{target}.weight")
    if [piece.source for piece in pieces] != [whole(tuple(weight.shape))]:
        message = f"{target} of {type(hf).__name__} is more than one tensor on disk, so it cannot have an adapter"
        raise RecipeError(_problem("target_modules", "unsupported", message))
    linear = hf.get_submodule(target)
    assert isinstance(linear, nn.Linear)
    layer = AdaptedLinear(linear, adapters.spec, adapters.switch)
    hf.set_submodule(target, layer)
    for parameter in ("weight", "bias"):
        if f"{target}.{parameter}" in layout:
            layout[f"{target}.base_layer.{parameter}"] = layout.pop(f"{target}.{parameter}")
    stored = pieces[0].name.removesuffix(".weight")
    size, a, b = (linear.out_features, linear.in_features), target + spec.A, target + spec.B
    magnitude = f"{target}{spec.MAGNITUDE}" if adapters.spec.dora else None
    return LinearAdapter(stored, layer, size, f"{target}.base_layer.weight", a, b, magnitude)


def _problem(name: str, code: str, message: str) -> Problem:
    return Problem(f"{KEY}.{name}", code, message)


def _wrong_names(
    hf: PreTrainedModel, config: LoRAConfig, layers: list[str], heads: set[str], experts: Mapping[str, ExpertParameter]
) -> Iterator[Problem]:
    """Yield a problem for each name in the recipe that selects no layer, or one that cannot have an adapter."""
    modules = [name for name, _ in hf.named_modules() if name]
    for key, allowed in (("target_modules", set(layers)), ("exclude_modules", heads.union(layers))):
        for pattern in getattr(config, key):
            matches = [name for name in (*modules, *experts) if is_named(name, [pattern])]
            if not matches or not set(matches) <= allowed:
                available = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                matched = ", ".join(matches[:2]) or "no layer"
                message = f"got '{pattern}', which is {matched} of {type(hf).__name__}; expected some of: {available}"
                yield _problem(key, "not-a-choice", message)
    if config.match_all_linear == bool(config.target_modules):
        count, choice = len(config.target_modules), str(config.match_all_linear).lower()
        message = f"got {count} names with match_all_linear={choice}; expected either match_all_linear=true or names"
        yield _problem("target_modules", "contradiction", message)
    if config.match_all_linear and (names := _other_experts(hf, experts)):
        message = (
            f"got true for {type(hf).__name__}, whose experts ({names}) transformers does not dispatch by token, so they cannot"
            " have adapters; expected false, with layers in target_modules"
        )
        yield _problem("match_all_linear", "unsupported", message)


def _targets(config: LoRAConfig, layers: list[str]) -> list[str]:
    """Return the names of those linear modules and experts' parameters that get adapters."""
    targets = [name for name in layers if is_adapted(name, config)]
    if not targets:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one layer to remain"
        raise RecipeError(_problem("exclude_modules", "contradiction", message))
    return targets


def _other_experts(hf: PreTrainedModel, experts: Mapping[str, ExpertParameter]) -> str | None:
    """Return the name of a parameter that holds experts but cannot have adapters; None if there is none."""
    others = {
        f"{name}.weight" for name, module in hf.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }.union(other_modalities(hf))
    stacked = (name for name, parameter in hf.named_parameters() if parameter.dim() > 2)
    return next((name for name in stacked if name not in experts and name not in others), None)


def not_served(adapters: Adapters) -> Iterator[Problem]:
    """Yield a problem if refits must not send these adapters alone, as `adapted_layers.not_served` does."""
    experts = [adapter.weight for adapter in adapters.items if isinstance(adapter, ExpertsAdapter)]
    linear = [adapter.stored for adapter in adapters.items if isinstance(adapter, LinearAdapter)]
    yield from adapted_layers.not_served(experts, linear)


class MergedWeights:
    """This rank's part of each adapted weight, merged with its adapter in separate memory."""

    def __init__(self, adapters: Adapters, parameters: Parameters, device: torch.device):
        self._adapters = adapters
        self._parameters = parameters
        self._device = device
        self.tensors = {adapter.weight: torch.empty_like(local(parameters[adapter.weight])) for adapter in adapters.items}
        self.refresh()

    def refresh(self) -> None:
        """Merge the current adapters. Collective."""
        for adapter in self._adapters.items:
            self.tensors[adapter.weight].copy_(adapter.merged(self._adapters.spec, self._parameters, self._device))


def _whole(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    return gather_full(parameter, local(parameter).to(device))
