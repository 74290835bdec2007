"""Register the algorithm of a recipe that is not one of ours, before the recipe is checked.

`algorithm: my_algorithms.focal.Focal` names a class by its dotted path. Its section of the recipe has the name of its file,
`focal`. An installed package names its class by an entry point, whose name is the section's. Either way the recipe then has
`algorithm: focal` and `algorithm_class: my_algorithms.focal.Focal`, and the class is used as ours are.

The class is imported, so a plan or a dry run of a recipe that is not trusted refuses it. A command that only reads a run's
folder imports nothing either: it takes the most similar class of ours, with the section's values as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from pipeline.algorithms import ALGORITHMS, CLASSES, GROUP, problem
from pipeline.algorithms.algorithm import Algorithm
from pipeline.config.config_tree import ConfigMapping, ConfigValue
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import not_a_kind
from pipeline.seams import entry_points
from pipeline.seams.registered_class import check_section

MayImport = Callable[[str, Collection[str]], Collection[str] | None]
"""(dotted path, the recipe's module_folders) -> folders to search for the module, or None if it may not be imported."""

_paths: dict[str, tuple[str, bool]] = {}  # name -> (dotted path of the class in ALGORITHMS, whether it is a stand-in)


def register(tree: ConfigMapping, may_import: MayImport | None, taken: Collection[str]) -> Problem | None:
    """Register the user's algorithm that a recipe's tree names, and name its section in the tree. Return why it cannot be.

    may_import: None for a run's recipe that is only read. taken: keys of a recipe, which no section may have.
    """
    name, path, origin = _named(tree)
    if path is None:
        if name in CLASSES and (of_class := tree.find("algorithm_class")):
            tree.set("algorithm_class", ConfigValue(None, of_class.origin))  # of the recipe from which this one inherits
        return None
    wrong: tuple[str, str] | None = None
    if name in taken or name in CLASSES:
        other = "an algorithm of Hetstep" if name in CLASSES else "a key of every recipe"
        wrong = "already-exists", f"its section would be '{name}', the name of its file, which is {other}. Rename the file"
    elif may_import is None:
        _stand_in(name, path, tree)
    elif name not in _paths or _paths[name] != (path, False):
        wrong = _import(name, path, tree, may_import)
    if wrong:
        return Problem("algorithm", wrong[0], f"{path}: {wrong[1]}", origin)
    for key, value in (("algorithm", name), ("algorithm_class", path)):
        tree.set(key, ConfigValue(value, origin))
    return None


def _named(tree: ConfigMapping) -> tuple[str, str | None, str]:
    """Return (name of the section, dotted path of the class or None for one of ours, origin)."""
    node, of_class = tree.find("algorithm"), tree.find("algorithm_class")
    name, origin = getattr(node, "value", None), (node.origin or "" if node else "")
    if not isinstance(name, str) or name in CLASSES:
        return str(name), None, origin
    if "." in name:
        return name.split(".")[-2], None if not_a_kind(name, ()) else name, origin
    if isinstance(path := getattr(of_class, "value", None), str):
        return name, path, origin
    entry_points.refuse_names_of_ours(GROUP, CLASSES)
    installed = entry_points.find(GROUP).get(name)
    return name, installed.path if installed else None, origin


def _import(name: str, path: str, tree: ConfigMapping, may_import: MayImport) -> tuple[str, str] | None:
    """Import and register a class. Return (code, message) if it cannot be used."""
    folders = tree.find("module_folders")
    searched = [str(folder) for folder in folders.value] if isinstance(folders, ConfigValue) and folders.value else []
    is_installed = any(path == point.path for point in entry_points.find(GROUP).values())
    folders_to_search = [] if is_installed else may_import(path, searched)
    if folders_to_search is None:
        return "not-importable", (
            "its code is not imported, because nothing will be submitted and the recipe may be a stranger's. Try trust=true, or"
            " its folder in HETSTEP_TRUSTED, if you trust it"
        )
    user_code.search_in(folders_to_search, only=True)
    try:
        kind = user_code.load(path)
        if wrong := problem(kind):
            return "wrong-type", wrong
        check_section(kind, name)
    except user_code.NotFound as error:
        return "not-importable", f"{error}. Try to move it beside the recipe's file, or module_folders=[FOLDER]"
    except TypeError as error:
        return "wrong-type", str(error)
    except Exception as error:
        return "not-importable", f"it cannot be imported: {type(error).__name__}: {error}"
    ALGORITHMS[name], _paths[name] = kind, (path, False)
    return None


def _stand_in(name: str, path: str, tree: ConfigMapping) -> None:
    """Register the class of ours whose section is the most similar, with the values in the tree as its section."""
    if name in _paths and _paths[name][0] == path:
        return
    section = tree.find(name)
    values: dict[str, Any] = section.plain() if isinstance(section, ConfigMapping) else {}

    def shared(kind: type[Algorithm]) -> tuple[bool, int]:
        own = {field.name for field in dataclasses.fields(kind.Section)}
        return own <= values.keys(), len(own)

    nearest = max((ALGORITHMS[other] for other in CLASSES if other != "evaluate"), key=shared)
    known = {field.name for field in dataclasses.fields(nearest.Section)}
    others: list[Any] = [(key, Any, dataclasses.field(default=None)) for key in values if key not in known]
    stand_in = dataclasses.make_dataclass(f"{name}_section", others, bases=(nearest.Section,))
    ALGORITHMS[name] = type(name, (nearest,), {"Section": stand_in, "problems": Algorithm.problems})
    _paths[name] = path, True
