"""Read recipes for the commands; the extra `nemo_rl` translates recipes of NeMo-RL into our keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launch.recipes import trust
from pipeline import config
from pipeline.config import Loaded, Recipe, refuse
from pipeline.config.config_tree import ConfigMapping, ConfigNode
from pipeline.config.loading import Layers
from pipeline.seams import extras


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the checked recipe, as `config.load` does. Raises RecipeError with all problems."""
    reading = inspect(name, overrides)
    refuse(reading.problems)
    return reading.recipe


def inspect(name: str, overrides: Iterable[str] = ()) -> Loaded:
    """Return the recipe with its problems, as `config.inspect` does; a NeMo-RL recipe is translated."""
    return config.inspect(name, overrides, _translate, may_import=trust.may_import)


def _translate(path: Path, tree: ConfigMapping, arguments: list[tuple[str, ConfigNode]]) -> Layers:
    return extras.load("nemo_rl", "algorithm", f"a recipe of NeMo-RL ({path})").read(path, tree, arguments)
