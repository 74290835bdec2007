"""Files that a recipe of theirs names: paths there are relative to the root of their repository, which the recipe lies in."""

from __future__ import annotations

from pathlib import Path


def find(name: str, recipe: Path) -> Path | None:
    """The file, as it is, or below a folder that the recipe lies in. None if there is none."""
    return next((path for path in (folder / name for folder in (Path(), *recipe.resolve().parents)) if path.is_file()), None)


def missing(name: str, recipe: Path) -> str:
    return f"there is no {name}, neither here nor below a folder that {recipe} lies in; an absolute path"
