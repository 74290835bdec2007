"""Translate the list of trackers that a recipe of verl or TRL names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from launch.recipes.translation.translator import Translator

SHARED_TRACKERS = ("wandb", "mlflow", "trackio")
"""Trackers that have the same name here."""


def put_trackers(t: Translator, key: str, silent: Collection[str | None]) -> list[Any]:
    """Switch on the trackers at a key of the recipe, and return their names. silent: names that need no note."""
    names: Any = t.get(key)
    names = names if isinstance(names, list) else [names]
    for name in names:
        if name in SHARED_TRACKERS:
            t.put(f"logger.{name}_enabled", True, key)
        elif name not in silent:
            t.ignore(f"{key}: {name}", "is not a tracker here; metrics.jsonl and TensorBoard's events are written")
    return names
