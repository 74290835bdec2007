"""Code of the user's own, which a recipe names by its dotted path: `my_package.my_module.MyEnvironment`.

It is looked for where Python looks (the working directory, PYTHONPATH, what is installed), and then in the recipe's
`module_folders`, of which the folder of the recipe's file is one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any


class NotFound(ValueError):
    """There is no such module, or it has no such name."""


def search_in(folders: Iterable[str]) -> None:
    """Lets `load` look there too, after all other places: a module there hides none that is installed."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


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
        raise NotFound(f"{module} ({getattr(found, '__file__', None) or 'a folder'}) has no {name}")
    return getattr(found, name)
