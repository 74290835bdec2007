"""Apply `hf_config_overrides` to a config.json: one meaning for plans, trainers, exports and engines. Without torch.

A value replaces that of the file. Mappings whose name ends in `_config`, such as `text_config`, are merged key by key. RoPE is
merged as `rope.py` says. Fewer layers are the first ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models import rope


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any], key: str = "hf_config_overrides") -> dict[str, Any]:
    """Return config.json with the recipe's overrides. key: of the overrides in the recipe. Raises as `rope.merge` does."""
    merged = rope.merge(config, overrides, key)
    for name, value in overrides.items():
        if name in rope.SPELLINGS:
            continue
        before = merged.get(name)
        nested = name.endswith("_config") and isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = overridden(before, value, f"{key}.{name}") if nested and before is not None else value
    layers, kinds = merged.get("num_hidden_layers"), merged.get("layer_types")
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and isinstance(kinds, list):
        merged["layer_types"] = kinds[:layers]  # the first layers of the model
    return merged
