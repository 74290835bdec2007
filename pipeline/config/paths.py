"""Make the names and relative paths in a recipe absolute.

A path in a recipe's file is relative to the file's folder; a path on the command line is relative to the working directory.
`run_dir` and paths that start with `runs/` are always relative to the working directory, where runs write. The resolved recipe
has absolute paths. Names of other recipes (`defaults`, `needs`) are files next to the file that names them, or recipes in
recipes/.

Not handled: other paths in the `kwargs` of environments and data sets, which only these interpret.
"""

from __future__ import annotations

import fnmatch
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.config_tree import RECIPES, ConfigMapping, ConfigValue, no_recipe, other_recipe
from pipeline.config.data import GENERATED_DATASETS, NAMED_DATASETS, is_dotted_path
from pipeline.config.interpolation import interpolated
from pipeline.recipe.problems import Problem, RecipeError, collected
from pipeline.recipe.values import IN_FILE, is_template

FILES = (
    *("data.*.data_path", "data.*.prompt_file", "data.*.system_prompt_file", "module_folders"),
    *("evaluate.tasks.*.data.data_path", "evaluate.tasks.*.judge_prompt_file", "evaluate.tasks.*.format_kwargs.baseline_file"),
    *("evaluate.checkpoint", "evaluate.run", "evaluate.lm_eval.include_path", "env.*.kwargs.files"),
    "checkpointing.encryption.key_file",
)
NAMES = (  # a folder, or a name of a hub
    *("*.model_name", "*.tokenizer.name", "data.*.dataset_name"),
    "evaluate.tasks.*.data.dataset_name",
)
TEMPLATES = ("*.tokenizer.chat_template",)
"""Keys whose values are a template, a path, or a name. A value is a path if it exists, ends in .jinja, or has a slash."""
CODE = ("env.*.kind", "env.*.rewards", "env.*.kwargs.function")
"""Keys whose values, or the key `fn` of a list's entries, are FILE.py:NAME or no path."""
COMMANDS = ("env.*.kwargs.command", "env.*.kwargs.score")
"""Keys whose values are a program and its arguments, which are paths if they exist."""
MARKED = (
    *("cluster.*.container_image", "cluster.*.container_mounts", "cluster.*.gpu", "cluster.*.python"),
    "cluster.audit",
    "evaluation.suite",
)
"""Keys whose values are paths only if they begin with `./`, `../` or `~`."""
WRITTEN = "runs"
SOURCES = {"dataset_name": "data_path", "data_path": "dataset_name"}
"""Key of a data set's source -> the other key. A data set has only one of them, so a layer that sets one removes the other."""


def absolute(tree: ConfigMapping, folders: Mapping[str, Path | None] = {}) -> dict[str, Problem]:
    """Make the relative paths in a tree absolute, in place. Return key -> problem. Skip values with interpolations.

    folders: key -> folder of the file that set the value, for values that were interpolations and are now resolved.
    """
    problems: dict[str, Problem] = {}
    for key, leaf in tree.leaves():
        kind = _kind(key)
        if (kind is None and key != "run_dir") or interpolated(leaf.value):
            continue
        folder = leaf.folder or folders.get(key) or Path.cwd()
        value = _text(leaf.value)
        with collected(found := []):
            if key == "run_dir" and isinstance(value, str) and value:
                leaf.value = _from(Path.cwd(), value)
            elif kind is CODE:
                leaf.value = _code(folder, leaf.value)
            elif kind is COMMANDS and isinstance(value, list):
                leaf.value = [_from(folder, item) if _is_file(folder, item) else item for item in value]
            elif kind is TEMPLATES:
                leaf.value = _template(folder, leaf.value)
            elif kind is MARKED and isinstance(value, list):
                leaf.value = [_marked(folder, item) for item in value]
            elif kind is MARKED:
                leaf.value = _marked(folder, leaf.value)
            elif kind is FILES and isinstance(value, list):
                leaf.value = [_file(folder, item) if isinstance(item, str) else item for item in map(_text, value)]
            elif isinstance(value, str) and value:
                leaf.value = _file(folder, value) if kind is FILES else _name(key, folder, value)
        problems |= {problem.key: problem for problem in found}
    return problems


def is_path(key: str) -> bool:
    """Return whether the value at a dotted key may be a path."""
    return _kind(key) is not None


@functools.lru_cache(maxsize=4096)
def _kind(key: str) -> tuple[str, ...] | None:
    kinds = FILES, NAMES, CODE, COMMANDS, MARKED, TEMPLATES
    return next((kind for kind in kinds if any(fnmatch.fnmatchcase(key, one) for one in kind)), None)


def _text(value: object) -> object:
    """Return a number as a text, as the schema would convert it; other values unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _from(folder: Path, path: str) -> str:
    return os.path.abspath(folder / os.path.expanduser(path))


def _file(folder: Path, path: str) -> str:
    return _from(Path.cwd() if path.partition("/")[0] == WRITTEN else folder, path)


def _is_file(folder: Path, value: object) -> bool:
    return isinstance(value, str) and os.path.isfile(folder / os.path.expanduser(value))


def _marked(folder: Path, value: object) -> object:
    """Return a value of MARKED keys with an absolute path if it begins with `./`, `../` or `~`.

    In a mount such as `./a:/b:ro` the source becomes absolute.
    """
    if not isinstance(value, str) or not value.startswith(("./", "../", "~")):
        return value
    path, colon, rest = value.partition(":")
    return f"{_from(folder, path)}{colon}{rest}"


def _code(folder: Path, value: object) -> object:
    """Return FILE.py:NAME with an absolute path, also as `fn` of a list's entries; other values unchanged."""
    if isinstance(value, list):
        return [
            {**item, "fn": _code(folder, item.get("fn"))} if isinstance(item, dict) and "fn" in item else item for item in value
        ]
    if not isinstance(value, str) or not (found := IN_FILE.fullmatch(value)):
        return value
    return f"{_file(folder, found['file'])}:{found['name']}"


def _template(folder: Path, value: object) -> object:
    if not isinstance(value, str) or not value or is_template(value):
        return value
    is_file = value.endswith(".jinja") or "/" in value or os.path.exists(folder / value)
    return _file(folder, value) if is_file else value


def _name(key: str, folder: Path, name: str) -> str:
    """Return the absolute path if `name` is a folder, else `name` unchanged, as a name on a hub.

    Raise RecipeError for a folder that exists in the working directory but not in `folder`, that of the recipe's file.
    """
    if name in (*NAMED_DATASETS, *GENERATED_DATASETS):
        return name
    if name.startswith(("./", "../", "~", f"{WRITTEN}/")) or name in (".", ".."):
        return _file(folder, name)
    if os.path.isdir(folder / name):
        return _from(folder, name)
    if os.path.isdir(name) and not os.path.isabs(name):
        message = f"got '{name}', a folder in the working directory; expected a path relative to the recipe's folder, {folder}"
        raise RecipeError(Problem(key, "ambiguous", f"{message}. Try {os.path.abspath(name)}"))
    return name


def with_one_source(below: ConfigMapping, above: ConfigMapping) -> None:
    """Let the layer `above` replace the source of a data set in `below`: set the other key of SOURCES to null in `above`."""
    for key, node in list(above.leaves("")):
        section, _, name = key.rpartition(".")
        names_data = section.startswith("data.") or fnmatch.fnmatchcase(section, "evaluate.tasks.*.data")
        if name in SOURCES and names_data and getattr(node, "value", None) is not None:
            other = f"{section}.{SOURCES[name]}"
            if above.find(other) is None and getattr(below.find(other), "value", None) is not None:
                above.set(other, ConfigValue(None, node.origin))


def find_needs(tree: ConfigMapping) -> list[Problem]:
    """Replace each recipe in `needs` by its name in recipes/ or else its absolute path, in place.

    Return a problem for each missing recipe.
    """
    node, problems = tree.find("needs"), []
    if isinstance(node, ConfigValue) and isinstance(node.value, list):
        found = []
        for need in node.value:
            path = other_recipe(need, node.folder or Path.cwd()) if isinstance(need, str) else None
            if path is None and isinstance(need, str):
                message = no_recipe(need, node.folder or Path.cwd())
                problems.append(Problem("needs", "file-not-found", message, node.origin or ""))
            elif path is not None:
                need = path.stem if path.parent == RECIPES else str(path)
            found.append(need)
        node.value = found
    return problems


def add_module_folders(tree: ConfigMapping, recipe: Path) -> None:
    """Add to `module_folders`, in place, the folders of the recipe's file and of files that name user code.

    Nothing is added if no key names user code.
    """
    leaf = tree.find("module_folders")
    given: list[object] = []
    if isinstance(leaf, ConfigValue) and isinstance(leaf.value, list):
        given = [_file(leaf.folder or Path.cwd(), item) if isinstance(item, str) else item for item in leaf.value]
    elif leaf is not None:
        return  # of another type, which the schema refuses
    naming = [node.folder or Path.cwd() for key, node in tree.leaves() if names_own_code(key, node.value)]
    if naming:
        folders = [*given, *map(str, (recipe.absolute().parent, *naming))]
        tree.set("module_folders", ConfigValue(list(dict.fromkeys(folders)), leaf.origin if leaf else None))


CODE_KEYS = ("algorithm", "algorithm_class", "loss_fn.custom", "rollout")
"""Keys whose value names user code if it has a dot."""


def names_own_code(key: str, value: object) -> bool:
    """Return whether the value at a dotted key names user code."""
    if key in CODE_KEYS:
        return isinstance(value, str) and "." in value
    if any(fnmatch.fnmatchcase(key, one) for one in ("data.*.dataset_name", "evaluate.tasks.*.data.dataset_name")):
        return isinstance(value, str) and is_dotted_path(value)
    if fnmatch.fnmatchcase(key, "data.*.processor") or fnmatch.fnmatchcase(key, "evaluate.tasks.*.format"):
        return isinstance(value, str) and "." in value
    if fnmatch.fnmatchcase(key, "env.*.kwargs.function"):
        return isinstance(value, str) and "." in value
    if fnmatch.fnmatchcase(key, "env.*.kwargs.tools*"):
        texts = value if isinstance(value, list) else [value]
        return any(isinstance(text, str) and "." in text for text in texts)
    if fnmatch.fnmatchcase(key, "env.*.rewards"):
        return isinstance(value, list) and any(isinstance(item, dict) and "." in str(item.get("fn")) for item in value)
    return fnmatch.fnmatchcase(key, "env.*.kind") and isinstance(value, str) and "." in value
