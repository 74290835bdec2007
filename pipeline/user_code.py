"""Code of the user's own, which a recipe names by its dotted path: `my_package.my_module.MyEnvironment`.

It is looked for where Python looks (PYTHONPATH, what is installed), then in the recipe's `module_folders`, of which the folder
of the recipe's file is one, and then in the working directory.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any


class NotFound(ValueError):
    """There is no such module, or it has no such name."""


def search_in(folders: Collection[str]) -> None:
    """Let `load` look there too and in the working directory, after all other places: a module there hides none that is
    installed. Without folders, as of a recipe that names no code of the user's own, it looks in none of them."""
    for folder in [*folders, os.getcwd()] if folders else ():
        if folder not in sys.path:
            sys.path.append(folder)


def load(path: str) -> Any:
    """What a dotted path names. Raises NotFound, saying where it was looked for, and what importing the module raises."""
    module, _, name = path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        places = ", ".join(dict.fromkeys(place or "." for place in sys.path if not place.endswith((".zip", "lib-dynload"))))
        raise NotFound(f"there is no module {error.name}; looked in {places}") from error
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, dir(found), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise NotFound(f"{module} ({getattr(found, '__file__', None) or 'a folder'}) has no {name}{hint}")
    return getattr(found, name)
