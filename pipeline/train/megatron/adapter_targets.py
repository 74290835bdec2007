"""Choose the modules of a Megatron-Core model that get adapters, and describe these as functions of Hugging Face tensors.

Megatron-Core fuses projections: linear_qkv, and linear_fc1 of a gated MLP. B of a fused module consists of the B of each
projection, placed like the rows of W. A is either shared (targets linear_qkv and linear_fc1, as NVIDIA Megatron-Bridge's LoRA),
and is then stored once for each projection, or each projection has its own (linear_q, linear_fc1_gate and so on, as its
CanonicalLoRA), stacked in one parameter. The two projections of an expert that share A are one layer, `gate_up_proj`, as in
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.config import MegatronLoRAConfig, Problem, RecipeError
from pipeline.config.megatron_checks import FUSED
from pipeline.models.base import Parameter
from pipeline.models.decoder import identity
from pipeline.models.recorded_layout import Shape, record
from pipeline.train.adapters.spec import MAGNITUDE, A, AdapterSpec, B

KEY = "policy.megatron_cfg.peft"
SUBMODULE = "adapter"  # of the adapted module


@dataclass(frozen=True)
class Target:
    """A module that gets adapters, over all ranks."""

    module: str  # global name in Megatron-Core: decoder.layers.3.self_attention.linear_qkv
    weight: Parameter  # of the module
    layers: tuple[str | None, ...]  # the adapter's layer on disk for each source of W; None: the source gets none
    shared: bool  # one A for all layers
    rows: tuple[int, ...]  # rows of each layer's B

    @property
    def stacked(self) -> int:
        """The number of A matrices [dim, in] in the module's parameter A."""
        return 1 if self.shared else len(self.names)

    @property
    def names(self) -> list[str]:
        """The layers on disk that are adapted."""
        return [layer for layer in self.layers if layer is not None]

    def parameters(self, spec: AdapterSpec) -> dict[str, Parameter]:
        """Return the adapter's whole parameters by global name: A [stacked dim, in], B [out, dim], with DoRA m [out]."""
        split, expert = self.weight.split, self.weight.expert
        of_a = self.names[:1] if self.shared else self.names
        rows = partial(_rows, self.weight.function if len(self.layers) > 1 else identity, self._zeros())
        cut = "none" if split == "columns" else split
        columns = "columns" if split == "columns" else "none"
        name = f"{self.module}.{SUBMODULE}"
        found = {
            f"{name}.lora_A": Parameter(tuple(layer + A for layer in of_a), _stack, columns, expert),
            f"{name}.lora_B": Parameter(tuple(layer + B for layer in self.names), rows, cut, expert),
        }
        if spec.dora:
            found[f"{name}.magnitude"] = Parameter(tuple(layer + MAGNITUDE for layer in self.names), rows, cut, expert)
        return found

    def owners(self) -> list[int]:
        """Return the number of the A matrix of each row of W [out], or -1 where the row has no adapter."""
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
        """Return {name of a stored A: names under which the same A is stored too}."""
        first, *others = self.names
        return {first + A: [layer + A for layer in others]} if self.shared and others else {}

    def _zeros(self) -> tuple[int | None, ...]:
        """Return for each source the number of its rows if it has no adapter, else None."""
        return tuple(count if layer is None else None for layer, count in zip(self.layers, self.rows, strict=True))


def _stack(*matrices: torch.Tensor) -> torch.Tensor:
    first, *others = matrices
    return torch.cat(matrices) if others else first


def _rows(function, zeros: tuple[int | None, ...], *sources: torch.Tensor) -> torch.Tensor:
    """Apply the function of W to tensors with the rows of its sources. zeros: the number of rows of each that is 0."""
    given = iter(sources)
    return function(*(next(given) if rows is None else sources[0].new_zeros(rows, *sources[0].shape[1:]) for rows in zeros))


def targets(
    config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], shapes: Mapping[str, Shape], prefix: str = "decoder."
) -> list[Target]:
    """Return the modules that get adapters, in the model's order.

    parameters: of the whole model; shapes: of the tensors on disk. Raises RecipeError for names that match no module.
    """
    if not config.target_modules and any(name.endswith(".in_proj.weight") for name in parameters):
        message = "got no names for a model with Mamba layers, whose projections cannot have adapters; expected names"
        raise RecipeError(Problem(f"{KEY}.target_modules", "unsupported", message))
    unmatched = {("target_modules", name) for name in config.target_modules}
    unmatched |= {("exclude_modules", name) for name in config.exclude_modules}
    found, modules = [], []
    for module, weight in _linear(parameters, prefix):
        modules.append(module.rpartition(".")[2])
        chosen, used = _chosen(config, module, len(weight.sources))
        unmatched -= used
        if any(chosen):
            found.append(_target(module, weight, chosen, shapes))
    if unmatched:
        key, name = sorted(unmatched)[0]
        names = {part for module in modules for part in (module, *FUSED.get(module, ()))}
        message = f"got '{name}', which no linear layer of the model matches; expected some of: {', '.join(sorted(names))}"
        raise RecipeError(Problem(f"{KEY}.{key}", "not-a-choice", message))
    if not found:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one left"
        raise RecipeError(Problem(f"{KEY}.exclude_modules", "contradiction", message))
    return found


def _linear(parameters: Mapping[str, Parameter], prefix: str) -> Iterator[tuple[str, Parameter]]:
    """Yield (module, its weight) of every linear layer."""
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.startswith(prefix) and module.rpartition(".")[2].startswith("linear_"):
            yield module, parameter


def _chosen(config: MegatronLoRAConfig, module: str, sources: int) -> tuple[tuple[str | None, ...], set[tuple[str, str]]]:
    """Return ("shared", "own" or None for each source of a module's weight, the (key, name) pairs that match it)."""
    path, _, own = module.rpartition(".")
    parts: tuple[str, ...] = FUSED.get(own, ()) if sources > 1 else ()
    if not config.target_modules:
        excluding = {("exclude_modules", name) for name in config.exclude_modules if _matches(name, module)}
        return (None if excluding else "shared",) * sources, excluding
    whole = {name for name in config.target_modules if _matches(name, module)}
    of_parts = [{name for name in config.target_modules if _matches(name, f"{path}.{part}")} for part in parts]
    matching = whole.union(*of_parts)
    if whole and len(matching) > len(whole):
        message = (
            f"got {', '.join(sorted(matching))}, which give {module} both a shared A and an own one; expected one of the two"
        )
        raise RecipeError(Problem(f"{KEY}.target_modules", "contradiction", message))
    if whole:
        return ("shared",) * sources, {("target_modules", name) for name in matching}
    return tuple("own" if names else None for names in of_parts), {("target_modules", name) for name in matching}


def _matches(pattern: str, module: str) -> bool:
    """Return whether a name of the recipe, or a pattern with * for any characters, means this module."""
    if "*" not in pattern:
        return pattern == module or pattern == module.rpartition(".")[2]
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None


def _target(module: str, weight: Parameter, chosen: tuple[str | None, ...], shapes: Mapping[str, Shape]) -> Target:
    layers = [source.removesuffix(".weight") for source in weight.sources]
    rows = tuple(shapes[source][0] for source in weight.sources)
    shared = "own" not in chosen
    if weight.expert is not None and shared:
        expert = re.match(r"(.+\.experts\.\d+)\.", layers[0])
        assert expert is not None, f"{layers[0]} is not the name of an expert's layer"
        kind = "gate_up_proj" if len(layers) > 1 else "down_proj"
        return Target(module, weight, (f"{_as_in_transformers(expert[1])}.{kind}",), True, (sum(rows),))
    return Target(
        module, weight, tuple(layer if one else None for layer, one in zip(layers, chosen, strict=True)), shared, rows
    )


def _as_in_transformers(expert: str) -> str:
    """Return the name of an expert as transformers has it: Mixtral's files have another name of the mixture."""
    return expert.replace(".block_sparse_moe.", ".mlp.")
