"""Choose the modules of a Megatron-Core model that get adapters, by the names of a recipe, and describe these adapters.

Train ranks, engines and plans all take the names, the shapes and the order of a model's adapters from here. Needs no torch, so
that names are checked before submission too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.config import LoRAConfig, MegatronLoRAConfig, Problem, RecipeError
from pipeline.config.megatron_checks import FUSED
from pipeline.models.family import Parameter
from pipeline.train.adapters.adapted_layers import not_served
from pipeline.train.adapters.spec import A, AdapterSpec, in_transformers

KEY = "policy.megatron_cfg.peft"
EXPERTS = "*.local_experts.*"
"""The pattern that matches the layers of all routed experts."""
OF_MIXERS = ("in_proj", "out_proj")
"""The projections of state spaces and delta nets."""
Shape = tuple[int, ...]
Choice = str | None
"""The adapter of one source of a module's weight.

"shared": all sources of the module share one A. "own": the source has an A of its own. None: the source has no adapter.
"""


@dataclass(frozen=True)
class AdaptedModule:
    """A Megatron-Core module that gets adapters, described as a whole and not as one rank's part."""

    name: str  # global name in Megatron-Core: decoder.layers.3.self_attention.linear_qkv
    weight: Parameter
    choices: tuple[Choice, ...]  # for each source of the weight

    @property
    def shared(self) -> bool:
        """Return whether all layers have one A."""
        return "own" not in self.choices

    @property
    def layers(self) -> tuple[str | None, ...]:
        """The adapter's layer on disk for each source of W; None: the source gets none. An expert's shared A is one layer."""
        layers = [source.removesuffix(".weight") for source in self.weight.sources]
        if self._is_joint:
            return (_expert_layer(layers),)
        return tuple(layer if choice else None for layer, choice in zip(layers, self.choices, strict=True))

    @property
    def names(self) -> list[str]:
        """The names of the layers on disk that get adapters."""
        return [layer for layer in self.layers if layer is not None]

    @property
    def stacked(self) -> int:
        """The number of A matrices [dim, in] in the module's parameter A."""
        return 1 if self.shared else len(self.names)

    def rows(self, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
        """Return the number of rows of B of each of `layers`. shapes: {name: shape} of the model's tensors on disk."""
        rows = tuple(shapes[source][0] for source in self.weight.sources)
        return (sum(rows),) if self._is_joint else rows

    def tensors(self, spec: AdapterSpec, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return {name on disk: shape} of the adapters' tensors. shapes: {name: shape} of the model's tensors on disk."""
        tensors, columns = {}, shapes[self.weight.sources[0]][1]
        for layer, rows in zip(self.layers, self.rows(shapes), strict=True):
            tensors |= spec.shapes(layer, rows, columns) if layer else {}
        return tensors

    def duplicates(self) -> dict[str, list[str]]:
        """Return {name on disk of an A: the other names under which the same A is stored}."""
        first, *copies = self.names
        return {first + A: [layer + A for layer in copies]} if self.shared and copies else {}

    @property
    def _is_joint(self) -> bool:
        return self.weight.expert is not None and self.shared


def choose(config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], prefix: str = "decoder.") -> list[AdaptedModule]:
    """Return the modules that get adapters, in the model's order.

    parameters: {global name: parameter} of the whole model. Raises RecipeError for a name in the recipe that matches no module,
    and for a module that cannot have an adapter.
    """
    unmatched = {("target_modules", name) for name in config.target_modules}
    if not config.target_modules:  # else one of the two is refused before
        unmatched |= {("exclude_modules", name) for name in config.exclude_modules}
    modules, names = [], set[str]()
    for module, weight in _linear(parameters, prefix):
        names.update(_names(module, len(weight.sources)))
        choices, used = _choices(config, module, len(weight.sources))
        unmatched -= used
        if any(choices):
            modules.append(AdaptedModule(module, weight, choices))
    if unmatched:
        key, name = sorted(unmatched)[0]
        message = f"got '{name}', which no linear layer of the model matches; expected some of: {', '.join(sorted(names))}"
        raise RecipeError(Problem(f"{KEY}.{key}", "not-a-choice", message))
    if not modules:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one layer to remain"
        raise RecipeError(Problem(f"{KEY}.exclude_modules", "contradiction", message))
    _check_experts(config, modules)
    return modules


def _check_experts(config: MegatronLoRAConfig, modules: list[AdaptedModule]) -> None:
    """Raise RecipeError if the modules are experts that are one tensor on disk (gpt-oss): these cannot have adapters."""
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
    """Return whether the recipe gives routed experts adapters in at least one of these layers.

    It compares the recipe's names with the names of expert 0 only. Raises RecipeError if the recipe gives a layer both a shared
    A and an A of its own.
    """
    experts = [f"{prefix}layers.{layer}.mlp.experts.local_experts.0" for layer in layers]
    fused = (_choices(config, f"{expert}.linear_fc1", 2)[0] for expert in experts)
    choices = (_choices(config, f"{expert}.linear_fc2", 1)[0] for expert in experts)
    return any(map(any, fused)) or any(map(any, choices))


def expert_of(source: str) -> str | None:
    """Return the name on disk of a tensor's expert, such as `model.layers.3.mlp.experts.17`; None if it has no expert."""
    match = re.match(r"(.+\.experts\.\d+)\.", source)
    return match and match[1]


def _linear(parameters: Mapping[str, Parameter], prefix: str) -> Iterator[tuple[str, Parameter]]:
    """Yield (name of the module, its weight) of every linear layer whose name begins with `prefix`."""
    for name, parameter in parameters.items():
        module, _, kind = name.rpartition(".")
        suffix = module.rpartition(".")[2]
        if kind == "weight" and module.startswith(prefix) and (suffix.startswith("linear_") or suffix in OF_MIXERS):
            yield module, parameter


def _choices(config: MegatronLoRAConfig, module: str, sources: int) -> tuple[tuple[Choice, ...], set[tuple[str, str]]]:
    """Return (the choice for each source of a module's weight, the recipe's (key, name) pairs that match the module).

    sources: the number of the weight's sources.
    """
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
            f"got {', '.join(sorted(matching))}, which give {module} both a shared A and separate ones; expected only one kind"
        )
        raise RecipeError(Problem(f"{KEY}.target_modules", "contradiction", message))
    if matches:
        return ("shared",) * sources, {("target_modules", name) for name in matching}
    return tuple("own" if names else None for names in of_parts), {("target_modules", name) for name in matching}


def _names(module: str, sources: int) -> tuple[str, ...]:
    """Return the last part of a module's name, followed by the names of its projections if its weight has several sources."""
    suffix = module.rpartition(".")[2]
    return suffix, *(FUSED.get(suffix, ())[:sources] if sources > 1 else ())  # keys may be the values too


def _matches(pattern: str, module: str) -> bool:
    """Return whether a name in the recipe selects this module. In the name, * stands for any characters."""
    if "*" not in pattern:
        return pattern == module or pattern == module.rpartition(".")[2]
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), module) is not None


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


def not_served_modules(chosen: list[AdaptedModule]) -> Iterator[Problem]:
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
