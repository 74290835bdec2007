"""What a translation has to know of a model: from its folder, or from recipes/models, which describes public ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).resolve().parents[2] / "recipes/models"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(model: str) -> bool | None:
    """Whether it is a mixture of experts; None if its config.json is neither here nor known."""
    folder = Path(model)
    config = _read(folder / "config.json" if folder.is_dir() else KNOWN / f"{model}.json")
    if config is None:
        return None
    text = {**config, **config.get("text_config", {})}
    return any(text.get(key) for key in EXPERTS)


def _read(path: Path) -> Mapping[str, Any] | None:
    """`like` in a description names another, which it has but for what it says itself."""
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    other = config.get("like")
    return {**(_read(KNOWN / f"{other}.json") or {}), **config} if other else config
