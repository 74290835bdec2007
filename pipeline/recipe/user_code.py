"""Load code of the user that a recipe names by a dotted path, such as `my_package.my_module.MyEnvironment`, or by FILE.py:NAME.

Modules are searched where Python searches (PYTHONPATH, installed packages), then in the recipe's `module_folders`, which
include the folder of the recipe's file, and then in the working directory.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.recipe.values import IN_FILE


class NotFound(ValueError):
    """Raised if there is no such module, or if it lacks the name."""


def search_in(folders: Collection[str], only: bool = False) -> None:
    """Let `load` search these folders and, unless `only`, the working directory, after all other places.

    A module there does not hide an installed one. Without folders, as for a recipe without the user's code, nothing is added.
    """
    for folder in [*folders, *([] if only else [os.getcwd()])] if folders else ():
        if folder not in sys.path:
            sys.path.append(folder)


def split(path: str) -> tuple[str, str]:
    """Return (module, name) of a dotted path, or (file, name) of FILE.py:NAME with an absolute path."""
    if found := IN_FILE.fullmatch(path):
        return found["file"], found["name"]
    module, _, name = path.rpartition(".")
    return module, name


def is_file(module: str) -> bool:
    """Return whether the first part of `split` is a file, whose path a recipe makes absolute, and not a dotted name."""
    return os.path.isabs(module)


def join(module: str, name: str) -> str:
    """Return the path of a name in a module or a file."""
    return f"{module}:{name}" if is_file(module) else f"{module}.{name}"


def _of_file(file: str) -> ModuleType:
    """Return the module in a file, which is imported once. Raises NotFound if there is no such file."""
    if not os.path.isfile(file):
        raise NotFound(f"there is no file {file}")
    path = os.path.realpath(file)
    name = f"{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # its name ends in .py
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load(path: str) -> Any:
    """Return the object that a path names. Raises NotFound, with the searched places, and errors of the import."""
    module, name = split(path)
    try:
        found = _of_file(module) if is_file(module) else importlib.import_module(module)
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
