"""How a recipe is read: the schema's defaults <- `defaults:` parents <- its YAML <- `key=value` from the command line."""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from pipeline.config.checks import validate
from pipeline.config.errors import RecipeError
from pipeline.config.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def load(name: str, overrides: list[str] = ()) -> Recipe:
    """The recipe `name` (in recipes/, or a path to a YAML file) with `key=value` overrides, complete and checked.

    Raises RecipeError.
    """
    path = find(name)
    config = OmegaConf.structured(Recipe)
    config.name = path.stem
    config.run_dir = f"runs/{path.stem}"
    for layer in _layers(path, seen=[]):
        config = _merge(config, layer[1], str(layer[0]))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise RecipeError(f"'{override}' on the command line is not key=value")
        try:
            layer = OmegaConf.from_dotlist([override])
        except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise RecipeError(f"{key} on the command line: {_first_line(error)}") from None
        config = _merge(config, layer, "the command line")
    return complete(config)


def read(path: Path) -> Recipe:
    """A resolved recipe as `write` left it in a run folder."""
    return complete(OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.load(path)))


def write(recipe: Recipe, path: Path) -> None:
    path.write_text(to_yaml(recipe))


def to_yaml(recipe: Recipe) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(recipe), resolve=True)


def find(name: str) -> Path:
    """The file of a recipe. Raises RecipeError with the recipes that exist."""
    for path in (RECIPES / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    known = sorted(p.stem for p in RECIPES.glob("*.yaml"))
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise RecipeError(f"recipe={name}: no such recipe; {hint}there are: {', '.join(known)}")


def _layers(path: Path, seen: list[Path]) -> list[tuple[Path, DictConfig]]:
    """The YAML at `path` preceded by its `defaults:` parents, oldest first."""
    if path in seen:
        raise RecipeError(f"{path}: 'defaults' goes in a circle: {' -> '.join(p.name for p in [*seen, path])}")
    try:
        layer = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(layer, DictConfig):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, this is a {type(layer).__name__}")
    parents = layer.pop("defaults", None) or []
    layers = []
    for parent in [parents] if isinstance(parents, str) else parents:
        parent_path = (path.parent / parent).resolve()
        if not parent_path.is_file():
            raise RecipeError(f"{path}: 'defaults: {parent}': there is no {parent_path}")
        layers += _layers(parent_path, [*seen, path])
    return [*layers, (path, layer)]


def _merge(config: DictConfig, layer: DictConfig, source: str) -> DictConfig:
    try:
        return OmegaConf.merge(config, layer)
    except ConfigKeyError as error:
        raise RecipeError(f"{source}: {_unknown_key(config, error.full_key)}") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{source}: {error.full_key or error.key or '(top)'}: {_first_line(error)}") from None


def _unknown_key(config: DictConfig, full_key: str) -> str:
    parent_key, _, key = full_key.rpartition(".")
    parent = OmegaConf.select(config, parent_key) if parent_key else config
    known = sorted(str(k) for k in parent)
    near = difflib.get_close_matches(key, known, 1)
    where = f"under '{parent_key}'" if parent_key else "at the top"
    hint = f"did you mean '{'.'.join(filter(None, [parent_key, near[0]]))}'?" if near else f"there are: {', '.join(known)}"
    return f"'{full_key}' is not a key; {hint} ({where})"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def complete(config: DictConfig) -> Recipe:
    """Resolve interpolations, insist on what has no default, check what the schema alone can tell."""
    try:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise RecipeError(f"{missing[0]} has no value; the recipe must set it")
        OmegaConf.resolve(config)
        recipe = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key}: {_first_line(error)}") from None
    validate(recipe)
    return recipe
