"""Read recipes for the commands; extras translate recipes of other projects into our keys (`foreign.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from launch.recipes import foreign, gguf, trust
from pipeline import config
from pipeline.config import Loaded, Recipe, refuse


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the checked recipe, as `config.load` does. Raises RecipeError with all problems."""
    reading = inspect(name, overrides)
    refuse(reading.problems)
    return reading.recipe


def inspect(name: str, overrides: Iterable[str] = ()) -> Loaded:
    """Return the recipe with its problems, as `config.inspect` does.

    A foreign recipe is translated, and GGUF files are dequantized.
    """
    return gguf.with_folders(config.inspect(name, overrides, foreign.read, may_import=trust.may_import))
