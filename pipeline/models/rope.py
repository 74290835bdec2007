"""Read and override the rotary position embeddings of a config.json, in all their spellings. Without torch.

A config.json has either `rope_theta` and `rope_scaling` {"type" or "rope_type", "factor", ...}, or `rope_parameters` with all
of these keys. `rope_parameters` may also have a mapping for each kind of layer: {"full_attention": {...}, "sliding_attention":
{...}}. An override may use another spelling than the file. A scaling of a new type replaces the model's scaling, but keeps the
model's theta. A scaling of the same type, or without a type, replaces only the keys that it has. null removes the scaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.problems import Problem, RecipeError

SCALING, PARAMETERS, THETA, LOCAL_THETA = "rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq"
SPELLINGS = (SCALING, PARAMETERS, THETA, LOCAL_THETA)
"""The keys of config.json for RoPE. LOCAL_THETA is the base of Gemma 3's sliding-window layers."""

GLOBAL_LAYERS, LOCAL_LAYERS = "full_attention", "sliding_attention"
REQUIRED = {  # type -> the keys that transformers requires; it derives original_max_position_embeddings
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),  # an older name of longrope
    "proportional": (),
    "mrope": (),  # older names of default, with sections
    "axial": (),
}
"""The types of RoPE that transformers computes."""
NUMBERS = (
    *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor"),
)
_FROM_PRETRAINING = ("llama3", "yarn", "longrope", "su")  # types whose original length is max_position_embeddings by default
_STAYS = (THETA, "partial_rotary_factor")  # of the model, not of a scaling


@dataclass(frozen=True, slots=True)
class Rope:
    """The RoPE of a model or of one kind of its layers, e.g. Rope("yarn", 1e6, 4.0, 32768, "config.json")."""

    kind: str
    theta: float | None  # None: the default of the family in transformers
    factor: float | None
    original: int | None  # tokens of the context before scaling
    source: str  # config.json, or the keys of the recipe that override it
    layers: str = ""  # the kind of layers, where kinds differ

    def __str__(self) -> str:
        theta = "transformers' default theta" if self.theta is None else f"theta {self.theta:g}"
        scaling = "" if self.factor is None else f", factor {self.factor:g}"
        scaling += "" if self.original is None else f" from {self.original:,} tokens"
        return f"{self.kind}, {theta}{scaling}{f' ({self.layers})' if self.layers else ''}"


def decide(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, key: str = "hf_config_overrides"
) -> list[Rope]:
    """Return the RoPE of a config.json after `overrides`: one for each kind of layers, none if the model has no RoPE.

    key: the recipe's key of the overrides. Raises RecipeError as `merge` does.
    """
    given = [name for name in SPELLINGS if name in (overrides or {})]
    merged = merge(config, overrides or {}, key)
    source = ", ".join(["config.json", *(f"{key}.{name}" for name in given)])
    positions = merged.get("max_position_embeddings")
    found = []
    for layers, parameters in _by_layers(merged).items():
        kind = _kind(parameters)
        original = parameters.get("original_max_position_embeddings")
        original = original or merged.get("original_max_position_embeddings") or positions
        scaled = kind in _FROM_PRETRAINING
        theta = parameters.get(THETA, merged.get(LOCAL_THETA if layers == LOCAL_LAYERS else THETA))
        found.append(Rope(kind, theta, parameters.get("factor"), original if scaled else None, source, layers))
    return found


def merge(config: Mapping[str, Any], overrides: Mapping[str, Any], key: str = "hf_config_overrides") -> dict[str, Any]:
    """Return config.json with the RoPE of `overrides`, in the spelling of the file. Other overrides are not applied.

    key: the recipe's key of the overrides. Raises RecipeError for overrides that are malformed or contradict each other.
    """
    merged = dict(config)
    given = {name: overrides[name] for name in SPELLINGS if name in overrides}
    scaling = _given_scaling(given, key)
    share = overrides.get("partial_rotary_factor")
    if not given and share is None:
        return merged
    present = merged.get(PARAMETERS) or {}
    layered = _is_layered(present) or _is_layered(scaling) or LOCAL_THETA in config
    if layered and not _is_layered(present):
        present = _layers_of(merged, key)
        merged.pop(SCALING, None)
    if layered:
        per_layers = scaling if _is_layered(scaling) else {} if scaling is _ABSENT else {GLOBAL_LAYERS: scaling}
        if unknown := [name for name in per_layers if name not in present]:
            what = f"got {unknown[0]}; expected one of {', '.join(present)}, the kinds of the model's layers"
            raise RecipeError(Problem(f"{key}.{PARAMETERS}", "not-a-choice", what))
        thetas = {GLOBAL_LAYERS: given.get(THETA), LOCAL_LAYERS: given.get(LOCAL_THETA)}
        merged[PARAMETERS] = {
            layers: _merged(parameters, per_layers.get(layers, _ABSENT), thetas.get(layers), share)
            for layers, parameters in present.items()
        }
        return merged
    if LOCAL_THETA in given:
        what = f"got {given[LOCAL_THETA]!r} for a model whose layers all have the same RoPE. Try {THETA}"
        raise RecipeError(Problem(f"{key}.{LOCAL_THETA}", "has-no-effect", what))
    in_parameters = bool(present) and not merged.get(SCALING)
    before = dict(present if in_parameters else merged.get(SCALING) or {})
    if THETA in merged and merged[THETA] is not None:
        before.setdefault(THETA, merged[THETA])
    after = _merged(before, scaling, given.get(THETA), share if "partial_rotary_factor" in before else None)
    if in_parameters:
        merged[PARAMETERS] = after
        merged.pop(THETA, None)  # it is in the parameters
        return merged
    merged.pop(PARAMETERS, None)
    if THETA in after:
        merged[THETA] = after.pop(THETA)
    if scaling is not _ABSENT or merged.get(SCALING):
        merged[SCALING] = after
    return merged


_ABSENT: dict[str, Any] = {}
"""Means that the overrides have no scaling. None, in contrast, removes the model's scaling."""


def _given_scaling(given: Mapping[str, Any], key: str) -> Any:
    """Return the scaling in the overrides, under either name: a mapping (flat or by kind of layers), None, or _ABSENT."""
    names = [name for name in (SCALING, PARAMETERS) if name in given]
    for name in names:
        if not isinstance(given[name], Mapping | None):
            raise RecipeError(Problem(f"{key}.{name}", "wrong-type", f"got {given[name]!r}; expected a mapping or null"))
    if len(names) == 2 and given[SCALING] != given[PARAMETERS]:
        raise RecipeError(
            Problem(f"{key}.{SCALING}", "contradiction", f"got a value that differs from {PARAMETERS}. Leave one of them out")
        )
    scaling = given[names[0]] if names else _ABSENT
    theta = given.get(THETA)
    if isinstance(scaling, Mapping) and theta is not None and scaling.get(THETA, theta) != theta:
        what = f"got {theta!r}, and {scaling[THETA]!r} in {names[0]}. Leave one of them out"
        raise RecipeError(Problem(f"{key}.{THETA}", "contradiction", what))
    return _ABSENT if scaling == {} else scaling


def _merged(before: Mapping[str, Any], scaling: Mapping[str, Any] | None, theta: Any, share: Any) -> dict[str, Any]:
    """Return RoPE parameters after an override. before: flat parameters. theta, share: overrides; None keeps the value."""
    now = _kind(before)
    stays = {name: before[name] for name in _STAYS if name in before}
    if scaling is None:
        after: dict[str, Any] = {**stays, "rope_type": "default"}
    else:
        kind = _kind(scaling, now)
        after = {**(before if kind == now else stays), **scaling, "rope_type": kind}
    after.pop("type", None)
    given = {THETA: theta, "partial_rotary_factor": share}
    return {**after, **{name: value for name, value in given.items() if value is not None}}


def _kind(parameters: Mapping[str, Any], default: str = "default") -> Any:
    return parameters.get("rope_type") or parameters.get("type") or default


def _is_layered(parameters: Any) -> bool:
    return (
        isinstance(parameters, Mapping) and bool(parameters) and all(isinstance(p, Mapping | None) for p in parameters.values())
    )


def _layers_of(config: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """Return {kind of layers: RoPE parameters} of a config.json in the older spelling, as transformers derives it for Gemma 3.

    Raises RecipeError for other families, whose layers have one RoPE.
    """
    if not str(config.get("model_type")).startswith("gemma3"):
        what = f"got RoPE by kind of layer, but all layers of a {config.get('model_type')} model have the same. Try {SCALING}"
        raise RecipeError(Problem(f"{key}.{PARAMETERS}", "unsupported", what))
    theta, local = config.get(THETA) or 1e6, config.get(LOCAL_THETA) or 1e4
    scaling = {name: value for name, value in (config.get(SCALING) or {}).items() if name != "type"}
    return {
        GLOBAL_LAYERS: {THETA: theta, **scaling, "rope_type": _kind(config.get(SCALING) or {})},
        LOCAL_LAYERS: {THETA: local, "rope_type": "default"},
    }


def _by_layers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return {kind of layers: RoPE parameters}. The kind is "" if all layers have the same; {} for a model without RoPE."""
    parameters = config.get(SCALING) or config.get(PARAMETERS) or {}
    if _is_layered(parameters):
        return {layers: flat for layers, flat in parameters.items() if flat is not None}
    if LOCAL_THETA in config:
        return {GLOBAL_LAYERS: parameters, LOCAL_LAYERS: {}}
    if not isinstance(parameters, Mapping) or config.get("model_type") == "nemotron_h":
        return {}
    return {"": parameters}


def problems(key: str, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield RoPE settings of a config.json that transformers would not compute. key: the recipe's key of the model."""
    for name in (SCALING, PARAMETERS):
        if not isinstance(config.get(name), Mapping | None):
            yield Problem(key, "wrong-type", f"got {name}={config[name]!r}; expected a mapping or null")
            return
    scaling, parameters = config.get(SCALING) or {}, config.get(PARAMETERS) or {}
    if any(scaling[name] != value for name, value in parameters.items() if name in scaling):
        yield Problem(key, "contradiction", f"config.json has {SCALING} and {PARAMETERS}, which differ; expected one of them")
    for name in (THETA, LOCAL_THETA):
        if config.get(name) is not None and not _is_positive(config[name]):
            yield Problem(key, "wrong-type", f"got {name}={config[name]!r}; expected a number above 0")
    for layers, parameters in _by_layers(config).items():
        yield from _flat_problems(key, parameters, f"the RoPE of {layers}" if layers else "RoPE")


def _flat_problems(key: str, parameters: Mapping[str, Any], what: str) -> Iterator[Problem]:
    kind = _kind(parameters)
    if not isinstance(kind, str) or kind not in REQUIRED:
        yield Problem(key, "not-a-choice", f"got {what} of type {kind!r}; expected one of {', '.join(REQUIRED)}")
        return
    if absent := [name for name in REQUIRED[kind] if parameters.get(name) is None]:
        yield Problem(key, "missing-value", f"got {what} of type {kind} without {', '.join(absent)}")
    for name in NUMBERS:
        value = parameters.get(name)
        if value is not None and not _is_positive(value) and not (name.startswith("mscale") and value == 0):
            yield Problem(key, "wrong-type", f"got {name}={value!r} in {what}; expected a number above 0")
    factor = parameters.get("factor")
    if factor is not None and _is_positive(factor) and factor < 1:
        yield Problem(key, "too-small", f"got factor={factor!r} in {what}; expected at least 1")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
