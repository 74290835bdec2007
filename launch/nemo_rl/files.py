"""Files that a recipe of theirs names: paths there are relative to the root of their repository, which the recipe lies in."""

from __future__ import annotations

import os
from pathlib import Path


def find(name: str, recipe: Path) -> Path | None:
    """The file below a folder that the recipe lies in, the nearest first, else below the working directory; its absolute path.
    None if there is none."""
    folders = (*Path(os.path.abspath(recipe)).parents, Path.cwd())
    return next((path for path in (folder / name for folder in folders) if path.is_file()), None)


def missing(name: str, recipe: Path) -> str:
    return f"there is no {name}, neither below a folder that {recipe} lies in nor in the working directory; an absolute path"
