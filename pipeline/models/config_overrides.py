"""Apply `hf_config_overrides` to a config.json, in the same way for plans, trainers, exports and engines. Without torch.

An override replaces the value in the file. Mappings whose name ends in `_config`, such as `text_config`, are merged key by key.
RoPE is merged as `rope.py` says. An override with fewer layers keeps the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models import rope


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any], key: str = "hf_config_overrides") -> dict[str, Any]:
    """Return config.json with the recipe's overrides. key: the recipe's key of the overrides. Raises as `rope.merge` does."""
    merged = rope.merge(config, overrides, key)
    for name, value in overrides.items():
        if name in rope.SPELLINGS:
            continue
        before = merged.get(name)
        nested = name.endswith("_config") and isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = overridden(before, value, f"{key}.{name}") if nested and before is not None else value
        if isinstance(before, float) and type(value) is int:  # transformers refuses 0 for 0.0
            merged[name] = float(value)
    layers, kinds = merged.get("num_hidden_layers"), merged.get("layer_types")
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and isinstance(kinds, list):
        merged["layer_types"] = kinds[:layers]  # the first layers of the model
    return merged
