"""The adapters of a model of the FSDP2 backend (`adapters/spec.py` defines them): which layers have one, and their weights.

Weights leave the backend merged, under the names of W; for a role that serves adapters, the adapters' own tensors leave it. A
checkpoint holds the adapters and a value head, without W: W is loaded from policy.model_name again. W without adapters is the
reference policy.

Routed experts are layers too: transformers keeps them in parameters of all experts, `gate_up_proj` and `down_proj`.

Not supported: adapters of embeddings, heads, routers and convolutions; trained biases.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.boxes import Piece, whole
from pipeline.config import LoRAConfig, Problem, RecipeError
from pipeline.models.hugging_face import SCORE
from pipeline.train.adapters import adapted_experts, spec
from pipeline.train.adapters.adapter_weights import KEY
from pipeline.train.adapters.fused_experts import ExpertParameter, expert_parameters
from pipeline.train.adapters.linear import AdaptedLinear, AdapterSwitch
from pipeline.train.adapters.model_adapters import Adapter, ExpertsAdapter, LinearAdapter, Parameters
from pipeline.train.adapters.spec import AdapterSpec
from pipeline.train.shards import local


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
        self.shapes |= adapter.shapes(self.spec)
        self.layout |= adapter.layout(self.spec)

    def initialize(self, parameters: Parameters, seed: int) -> None:
        """Set this rank's parts to their initial values, which are the same for every layout. W must be loaded before."""
        for adapter in self.items:
            adapter.initialize(self.spec, parameters, seed)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters within this context, so that the model computes with W alone."""
        self.switch.enabled = False
        try:
            yield
        finally:
            self.switch.enabled = True

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Apply the adapters' dropout within this context."""
        self.switch.dropout = True
        try:
            yield
        finally:
            self.switch.dropout = False


def inject(hf: PreTrainedModel, config: LoRAConfig, layout: dict[str, list[Piece]]) -> Adapters:
    """Add adapters in float32 to a model on the meta device. Only the adapters and a value head are trained then.

    layout: {parameter: its pieces} of the model; its keys are changed in place to the parameters' new names. Raises RecipeError
    if the recipe names a layer that cannot have an adapter.
    """
    if config.dim < 1:
        raise _problem("dim", "too-small", f"got {config.dim}; expected at least 1")
    adapters, experts = Adapters(AdapterSpec.of(config)), expert_parameters(hf)
    targets = _targets(hf, config, experts)
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
        raise _problem("target_modules", "unsupported", message)
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


def _problem(name: str, code: str, message: str) -> RecipeError:
    return RecipeError(Problem(f"{KEY}.{name}", code, message))


def _targets(hf: PreTrainedModel, config: LoRAConfig, experts: Mapping[str, ExpertParameter]) -> list[str]:
    """Return the names of the linear modules and of the experts' parameters that get adapters."""
    modules = {name: module for name, module in hf.named_modules() if name}
    heads = {name for name, module in modules.items() if module in (hf.get_output_embeddings(), getattr(hf, "score", None))}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in heads]
    layers = [*linear, *experts]
    for key, allowed in (("target_modules", set(layers)), ("exclude_modules", heads.union(layers))):
        for pattern in getattr(config, key):
            matches = [name for name in (*modules, *experts) if _matches(name, pattern)]
            if not matches or not set(matches) <= allowed:
                available = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                matched = ", ".join(matches[:2]) or "no layer"
                message = f"got '{pattern}', which is {matched} of {type(hf).__name__}; expected some of: {available}"
                raise _problem(key, "not-a-choice", message)
    if config.match_all_linear == bool(config.target_modules):
        count = len(config.target_modules)
        choice = str(config.match_all_linear).lower()
        message = f"got {count} names with match_all_linear={choice}; expected either match_all_linear=true or names"
        raise _problem("target_modules", "contradiction", message)
    if config.match_all_linear and (names := _other_experts(hf, experts)):
        message = (
            f"got true for {type(hf).__name__}, whose experts ({names}) transformers does not dispatch by token, so they cannot"
            " have adapters; expected false, with layers in target_modules"
        )
        raise _problem("match_all_linear", "unsupported", message)
    targets = layers if config.match_all_linear else [n for n in layers if any(_matches(n, t) for t in config.target_modules)]
    targets = [name for name in targets if not any(_matches(name, excluded) for excluded in config.exclude_modules)]
    if not targets:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one layer to remain"
        raise _problem("exclude_modules", "contradiction", message)
    return targets


def _other_experts(hf: PreTrainedModel, experts: Mapping[str, ExpertParameter]) -> str | None:
    """Return the name of a parameter that holds experts but cannot have adapters; None if there is none."""
    convolutions = {
        f"{name}.weight" for name, module in hf.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    stacked = (name for name, parameter in hf.named_parameters() if parameter.dim() > 2)
    return next((name for name in stacked if name not in experts and name not in convolutions), None)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)


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


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def record(config: LoRAConfig, random_seed: int | None) -> dict[str, Any]:
    """Return what a checkpoint records of its adapters besides their tensors. random_seed: the seed of W if W is random."""
    options = {"use_dora": True} if config.use_dora else {}
    options |= {"use_rslora": True} if config.use_rslora else {}
    return {"dim": config.dim, "alpha": config.alpha, "random_seed": random_seed, **options}


def check_record(folder: Path, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> None:
    """Raise RecipeError if the checkpoint in `folder` has other adapters than the recipe.

    theirs, ours: the `record` of the checkpoint and of the recipe; None: no adapters.
    """
    if theirs != ours:
        old, new = dict(theirs or {}), dict(ours or {})
        changes = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in old | new if old.get(k) != new.get(k))
        message = f"{folder} was saved with other adapters, or for weights of another random seed: {changes}"
        raise RecipeError(Problem(KEY, "contradiction", message))
