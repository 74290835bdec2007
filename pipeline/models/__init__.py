"""The model families that the Megatron-Core backend trains.

Start with `family`, which defines what a family's module contains, and with `llama`, the simplest one. A new family is one
module and one line of `_OURS`, or the module of an installed package with an entry point in the group `hetstep.families`. Other
families train with the FSDP2 backend, which uses transformers' own models.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from pipeline.models import (
    deepseek,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    llama,
    minimax_m2,
    moe,
    nemotron_h,
    qwen3_5,
)
from pipeline.models.family import Features, unsupported_model
from pipeline.seams.entry_points import Registry


def _installed(path: str) -> ModuleType:
    """Return the module of an installed package that describes a family. Raises RecipeError if it is not one."""
    try:
        module = importlib.import_module(path)
    except Exception as error:
        raise unsupported_model(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if missing := [name for name in ("transformer", "parameters") if not callable(getattr(module, name, None))]:
        raise unsupported_model(f"the module {path} has no {' and no '.join(missing)}; expected those of models/family.py")
    return module


_OURS: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_moe": moe,
    "mixtral": moe,
    "deepseek_v3": deepseek,
    "nemotron_h": nemotron_h,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek,
    "glm_moe_dsa": glm_moe_dsa,
    "minimax_m2": minimax_m2,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "ministral3": llama,
}
FAMILIES: Registry[ModuleType] = Registry("hetstep.families", _OURS, _installed)
"""`model_type` of a config.json -> the module that describes it."""


def family(model_type: str) -> ModuleType:
    """Return the module that describes models of this `model_type`. Raises RecipeError if there is none."""
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise unsupported_model(
            f"models of type '{model_type}' do not run on Megatron-Core; expected one of {known}. Try the FSDP2"
            " backend: policy.megatron_cfg.enabled=false"
        )
    return FAMILIES[model_type]


def features(config: Any) -> Features:
    """Return the features of a model that TransformerConfig cannot express. Raises RecipeError as `family` does."""
    of = family(config.model_type)
    return of.features(config) if hasattr(of, "features") else Features()
