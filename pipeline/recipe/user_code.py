"""Load code of the user that a recipe names by a dotted path, such as `my_package.my_module.MyEnvironment`.

Modules are searched where Python searches (PYTHONPATH, installed packages), then in the recipe's `module_folders`, which
include the folder of the recipe's file, and then in the working directory.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Collection
from typing import Any


class NotFound(ValueError):
    """Raised if there is no such module, or if it lacks the name."""


def search_in(folders: Collection[str]) -> None:
    """Let `load` search these folders and the working directory, after all other places.

    A module there does not hide an installed one. Without folders, as for a recipe without the user's code, nothing is added.
    """
    for folder in [*folders, os.getcwd()] if folders else ():
        if folder not in sys.path:
            sys.path.append(folder)


def load(path: str) -> Any:
    """Return the object that a dotted path names. Raises NotFound, with the searched places, and errors of the import."""
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
