"""Choose the modules of a Megatron-Core model that get adapters, by the names of a recipe.

Needs no torch, so that names are checked before submission too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.config import MegatronLoRAConfig, Problem, RecipeError
from pipeline.config.megatron_checks import FUSED
from pipeline.models.family import Parameter

KEY = "policy.megatron_cfg.peft"
EXPERTS = "*.local_experts.*"
"""The pattern of all routed experts."""
Choice = str | None
"""The adapter of a source of a module's weight. shared: all sources share an A; own: it has its own; None: it has none."""


@dataclass(frozen=True, slots=True)
class ChosenModule:
    """A module that gets adapters, over all ranks."""

    name: str  # global name in Megatron-Core: decoder.layers.3.self_attention.linear_qkv
    weight: Parameter
    choices: tuple[Choice, ...]  # for each source of the weight


def choose(config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], prefix: str = "decoder.") -> list[ChosenModule]:
    """Return the modules that get adapters, in the model's order.

    parameters: of the whole model. Raises RecipeError for names that match no module, and for modules that can have no adapter.
    """
    if not config.target_modules and any(name.endswith(".in_proj.weight") for name in parameters):
        suffixes = ", ".join(sorted({name.rpartition(".")[2] for name, _ in _linear(parameters, prefix)}))
        message = "got no names for a model with recurrent states, whose projections cannot have adapters; expected some of:"
        raise RecipeError(Problem(f"{KEY}.target_modules", "unsupported", f"{message} {suffixes}"))
    unmatched = {("target_modules", name) for name in config.target_modules}
    if not config.target_modules:  # else one of the two is refused before
        unmatched |= {("exclude_modules", name) for name in config.exclude_modules}
    modules, names = [], set[str]()
    for module, weight in _linear(parameters, prefix):
        names.update(_names(module, len(weight.sources)))
        choices, used = _choices(config, module, len(weight.sources))
        unmatched -= used
        if any(choices):
            modules.append(ChosenModule(module, weight, choices))
    if unmatched:
        key, name = sorted(unmatched)[0]
        message = f"got '{name}', which no linear layer of the model matches; expected some of: {', '.join(sorted(names))}"
        raise RecipeError(Problem(f"{KEY}.{key}", "not-a-choice", message))
    if not modules:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one left"
        raise RecipeError(Problem(f"{KEY}.exclude_modules", "contradiction", message))
    _check_experts(config, modules)
    return modules


def _check_experts(config: MegatronLoRAConfig, modules: list[ChosenModule]) -> None:
    """Refuse adapters of experts that are one tensor on disk (gpt-oss)."""
    if all(module.weight.expert is None or expert_of(module.weight.sources[0]) for module in modules):
        return
    key, value, hint = "target_modules", ", ".join(config.target_modules), "names of attention's layers"
    if not config.target_modules:
        key, value, hint = "exclude_modules", config.exclude_modules, f"{KEY}.exclude_modules='[\"{EXPERTS}\"]'"
    message = (
        f"got {value} for a model whose experts are one tensor, which cannot have adapters; expected names that leave them out"
    )
    raise RecipeError(Problem(f"{KEY}.{key}", "unsupported", f"{message}. Try {hint}"))


def adapts_experts(config: MegatronLoRAConfig, layers: Iterable[int], prefix: str = "decoder.") -> bool:
    """Return whether adapters of routed experts are chosen in one of these layers, by the names of the first expert.

    Raises RecipeError for a layer with both a shared A and an own one.
    """
    experts = [f"{prefix}layers.{layer}.mlp.experts.local_experts.0" for layer in layers]
    fused = (_choices(config, f"{expert}.linear_fc1", 2)[0] for expert in experts)
    choices = (_choices(config, f"{expert}.linear_fc2", 1)[0] for expert in experts)
    return any(map(any, fused)) or any(map(any, choices))


def expert_of(source: str) -> str | None:
    """Return the expert of a tensor on disk, as `model.layers.3.mlp.experts.17`; None if it belongs to no expert."""
    match = re.match(r"(.+\.experts\.\d+)\.", source)
    return match and match[1]


def _linear(parameters: Mapping[str, Parameter], prefix: str) -> Iterator[tuple[str, Parameter]]:
    """Yield (module, its weight) of every linear layer."""
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.startswith(prefix) and module.rpartition(".")[2].startswith("linear_"):
            yield module, parameter


def _choices(config: MegatronLoRAConfig, module: str, sources: int) -> tuple[tuple[Choice, ...], set[tuple[str, str]]]:
    """Return (the choice for each source of a module's weight, the (key, name) pairs that match it)."""
    path = module.rpartition(".")[0]
    _, *parts = _names(module, sources)
    if not config.target_modules:
        excluding = {("exclude_modules", name) for name in config.exclude_modules if _matches(name, module)}
        return (None if excluding else "shared",) * sources, excluding
    matches = {name for name in config.target_modules if _matches(name, module)}
    of_parts = [{name for name in config.target_modules if _matches(name, f"{path}.{part}")} for part in parts]
    matching = matches.union(*of_parts)
    if matches and len(matching) > len(matches):
        message = (
            f"got {', '.join(sorted(matching))}, which give {module} both a shared A and an own one; expected one of the two"
        )
        raise RecipeError(Problem(f"{KEY}.target_modules", "contradiction", message))
    if matches:
        return ("shared",) * sources, {("target_modules", name) for name in matching}
    return tuple("own" if names else None for names in of_parts), {("target_modules", name) for name in matching}


def _names(module: str, sources: int) -> tuple[str, ...]:
    """Return the last part of a module's name, then the names of its parts if its weight has several sources."""
    suffix = module.rpartition(".")[2]
    return suffix, *(FUSED.get(suffix, ()) if sources > 1 else ())


def _matches(pattern: str, module: str) -> bool:
    """Return whether a name of the recipe, or a pattern with * for any characters, means this module."""
    if "*" not in pattern:
        return pattern == module or pattern == module.rpartition(".")[2]
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None
