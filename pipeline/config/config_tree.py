"""Load YAML files as trees whose values record the line that set them, and merge such trees.

`pipeline/config/interpolation.py` resolves `${...}`; `pipeline/config/schema_validation.py` checks a tree against the schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import yaml

from pipeline.config.yaml_text import NOT_YAML, YAMLLoader, parse_value, summary
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import MISSING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
COMMAND_LINE = "the command line"
LONGEST_KEY = 400
MAX_YAML = 4 << 20
"""Largest YAML file, in bytes; the parser takes seconds and 100 MB of memory for each MB."""
DEEPEST = 50
"""Maximum nesting of a value."""
REPLACES = "_override_"  # true in a mapping: it replaces the mapping below it instead of being merged


@dataclass(slots=True)
class ConfigValue:
    """A scalar, null or a list, which a higher layer replaces as a whole."""

    value: Any
    origin: str | None = None  # "recipes/a.yaml:12" or COMMAND_LINE; None: the schema's default
    folder: Path | None = None  # the folder of the file that set it, absolute

    def copy(self) -> ConfigValue:
        """Return a copy of the node with the same value object."""
        return ConfigValue(self.value, self.origin, self.folder)


@dataclass(slots=True)
class ConfigMapping:
    """A mapping from keys to nodes, which is merged with those of higher layers."""

    children: dict[str, ConfigNode] = field(default_factory=dict)
    origin: str | None = None
    replaces: bool = False  # replaces lower layers and the schema's default instead of being merged with them

    def copy(self) -> ConfigMapping:
        """Return a deep copy; lists are shared."""
        return ConfigMapping({key: child.copy() for key, child in self.children.items()}, self.origin, self.replaces)

    def plain(self) -> dict[str, Any]:
        """Return the mapping as nested dicts of plain values."""
        return {key: node.plain() if isinstance(node, ConfigMapping) else node.value for key, node in self.children.items()}

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, ConfigValue]]:
        """Yield (dotted key, value node) of each value in the tree, in order."""
        for key, node in self.children.items():
            if isinstance(node, ConfigMapping):
                yield from node.leaves(f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", node

    def mappings(self) -> Iterator[ConfigMapping]:
        """Yield all mappings, this one first."""
        yield self
        for node in self.children.values():
            if isinstance(node, ConfigMapping):
                yield from node.mappings()

    def path(self, dotted: str) -> list[str]:
        """Split a dotted key into the keys of the nested mappings. Existing keys may contain dots."""
        names, branch = [], self
        while dotted:
            inside = branch.children if isinstance(branch, ConfigMapping) else {}
            fits = [name for name in inside if dotted == name or dotted.startswith(f"{name}.")]
            names.append(max(fits, key=len) if fits else dotted.partition(".")[0])
            branch, dotted = inside.get(names[-1]), dotted[len(names[-1]) + 1 :]
        return names

    def find(self, dotted: str) -> ConfigNode | None:
        """Return the node at a dotted key; None if there is none."""
        node: ConfigNode | None = self
        for key in self.path(dotted):
            node = node.children.get(key) if isinstance(node, ConfigMapping) else None
        return node

    def drop(self, dotted: str) -> None:
        """Remove a dotted key if it exists."""
        *path, last = self.path(dotted)
        branch: ConfigNode | None = self
        for key in path:
            branch = branch.children.get(key) if isinstance(branch, ConfigMapping) else None
        if isinstance(branch, ConfigMapping):
            branch.children.pop(last, None)

    def set(self, dotted: str, node: ConfigNode) -> None:
        """Set the node at a dotted key, creating missing mappings on the way."""
        branch, (*path, last) = self, self.path(dotted)
        for key in path:
            if not isinstance(child := branch.children.get(key), ConfigMapping):
                child = branch.children[key] = ConfigMapping(origin=node.origin)
            branch = child
        branch.children[last] = node


ConfigNode: TypeAlias = "ConfigValue | ConfigMapping"


def within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a dotted key equals, or is inside, one of the sections."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


@overload
def from_plain(
    value: dict[str, Any] | DataclassInstance, origin: str | None, origins: Mapping[str, str] = {}, prefix: str = ""
) -> ConfigMapping: ...
@overload
def from_plain(value: Any, origin: str | None, origins: Mapping[str, str] = {}, prefix: str = "") -> ConfigNode: ...
def from_plain(value: Any, origin: str | None, origins: Mapping[str, str] = {}, prefix: str = "") -> ConfigNode:
    """Return a plain value, or a dataclass, as a tree. origins: dotted key -> origin, for keys that have not their parent's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    origin = origins.get(prefix, origin)
    if not isinstance(value, dict):
        return ConfigValue(value, origin)
    branch = ConfigMapping(origin=origin)
    for key, child in value.items():
        branch.children[str(key)] = from_plain(child, origin, origins, f"{prefix}.{key}" if prefix else str(key))
    return branch


def merge(below: ConfigMapping, above: ConfigMapping) -> ConfigMapping:
    """Return `above` merged over `below`. Mappings are merged key by key; lists, null and scalars replace the lower value."""
    children = dict(below.children)
    for key, node in above.children.items():
        under = children.get(key)
        if isinstance(node, ConfigValue):
            if node.value != MISSING or under is None:  # ???: a layer above must give the value
                children[key] = node
        elif node.replaces:
            children[key] = node
        elif isinstance(under, ConfigMapping):
            children[key] = merge(under, node)
        else:
            children[key] = ConfigMapping(node.children, node.origin, replaces=under is not None)
    return ConfigMapping(children, above.origin or below.origin, below.replaces)


# ---- files --------------------------------------------------------------------------------------------------------------


NEVER_YAML = (".csv", ".ipynb", ".jsonl", ".md", ".parquet", ".py", ".sh")


def find_file(name: str, folder: Path, key: str, more: str = "", any_kind: bool = False) -> Path:
    """Return the file NAME.yaml in the folder, or else the file whose path is `name`, with or without .yaml.

    If there is none, raise RecipeError for `key`. Its message lists the names in the folder or, if `name` looks like a path
    (with a slash, .yaml or .yml), the file with the most similar name. Raise it too for a file of another kind, such as .py,
    unless `any_kind` is true.
    """
    for path in (folder / f"{name}.yaml", Path(name), Path(f"{name}.yaml")):
        if os.path.isfile(path):  # False also for a name that is too long for a file
            if path.suffix in NEVER_YAML and not any_kind:
                message = f"got '{name}'; expected a .yaml {key.rpartition('.')[2]}"
                raise RecipeError(Problem(key, "bad-format", message))
            return path
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    near = difflib.get_close_matches(re.sub(r"\.ya?ml$", "", Path(name).name), known, 1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    if name.endswith((".yaml", ".yml", ".sh", ".toml")) or os.sep in name:
        suggestion = _nearest_file(Path(name)) or (near[0] if near and os.sep not in name else None)
        message = f"there is no file {os.path.abspath(name)}" + (f"; did you mean {suggestion}?" if suggestion else "")
        raise RecipeError(Problem(key, "file-not-found", message))
    raise RecipeError(Problem(key, "file-not-found", f"got '{name}'; {hint}there are: {', '.join(known)}{more}"))


def _nearest_file(path: Path) -> str | None:
    """Return the YAML file in the folder of `path` with the most similar name; None if no name is similar."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):  # ValueError: a null byte
        return None
    stems = {Path(name).stem: name for name in sorted(names) if name.endswith((".yaml", ".yml"))}
    near = difflib.get_close_matches(path.stem, stems, 1)
    return str(path.parent / stems[near[0]]) if near else None


def load_with_parents(path: Path) -> ConfigMapping:
    """Return the YAML at `path` merged over its `defaults:` parents. Raise RecipeError for a file that cannot be read."""
    return functools.reduce(merge, load_layers(path), ConfigMapping())


def load_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[ConfigMapping]:
    """Return the trees of the `defaults:` parents of `path` and of `path` itself, lowest first.

    Raise RecipeError for a file that is missing or cannot be read, and for parents that form a circle.
    """
    real = path.resolve()
    if real in seen:
        circle = " -> ".join(parent.name for parent in [*seen, real])
        raise RecipeError(Problem("defaults", "circular", f"got a circle: {circle}", short_path(path)))
    layer = load_file(path)
    parents = layer.children.pop("defaults", ConfigValue([]))
    names = parents.value if isinstance(parents, ConfigValue) else parents
    origin = parents.origin or ""
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecipeError(Problem("defaults", "wrong-type", "expected a file name or a list of file names", origin))
    layers: list[ConfigMapping] = []
    for name in names:
        if (parent := other_recipe(name, path.parent, path)) is None:
            raise RecipeError(Problem("defaults", "file-not-found", no_recipe(name, path.parent), origin))
        layers += load_layers(parent, (*seen, real))
    return [*layers, layer]


def other_recipe(name: str, folder: Path, asking: Path | None = None) -> Path | None:
    """Return the absolute path of the recipe that a file in `folder` names; None if there is none.

    The name is a path relative to the folder, with or without .yaml, or else a recipe in recipes/. asking: the file that uses
    the name. If the file uses its own name, the recipe of this name in recipes/ is meant, if there is one.
    """
    for path in _places(name, folder):
        if os.path.isfile(path) and not (
            asking and path.parent != RECIPES and path.samefile(asking) and (RECIPES / path.name).is_file()
        ):
            return path
    return None


def no_recipe(name: str, folder: Path) -> str:
    """Return the error message for a name for which `other_recipe` returns None."""
    places = _places(name, folder)
    known = {path.stem for where in (folder, RECIPES) for path in where.glob("*.yaml")}
    near = difflib.get_close_matches(Path(name).name.removesuffix(".yaml"), sorted(known), 1)
    return f"got '{name}'; expected one of the files {', '.join(map(str, places))}" + (
        f". Did you mean {near[0]}?" if near else ""
    )


def _places(name: str, folder: Path) -> list[Path]:
    places = [folder / name, folder / f"{name}.yaml", RECIPES / f"{name}.yaml"]
    return list(dict.fromkeys(Path(os.path.abspath(path)) for path in places))


def load_file(path: Path) -> ConfigMapping:
    """Return the YAML at `path` as a tree, without its parents. Raise RecipeError for a file that cannot be read."""
    shown = short_path(path)
    try:
        loader = YAMLLoader(user_files.read_text(path, MAX_YAML))
        try:
            node = loader.get_single_node()
            tree = ConfigMapping() if node is None else _tree(loader, node, shown, ())
            for _, leaf in tree.leaves() if isinstance(tree, ConfigMapping) else ():
                leaf.folder = path.absolute().parent
        finally:
            loader.dispose()
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(Problem("", "unreadable", f"{error.strerror}", shown)) from None
    except NOT_YAML as error:
        raise RecipeError(Problem("", "bad-format", f"not YAML: {summary(error)}", shown)) from None
    if not isinstance(tree, ConfigMapping):
        raise RecipeError(Problem("", "wrong-type", f"got a {type(tree.value).__name__}; expected a mapping of keys", shown))
    return tree


def _tree(loader: Any, node: yaml.Node, file: str, above: tuple[yaml.Node, ...]) -> ConfigNode:
    origin = f"{file}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode) or node.tag != "tag:yaml.org,2002:map":
        value = loader.construct_object(node, deep=True)
        _insist_on_plain(value, origin)
        return ConfigValue(value, origin)
    if any(node is other for other in above):
        raise RecipeError(Problem("", "circular", "got a mapping that contains itself", origin))
    named = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    if len(set(named)) < len(named):
        double = next(name for number, name in enumerate(named) if name in named[:number])
        raise RecipeError(Problem(str(double), "given-twice", "got the key twice in one mapping", origin))
    loader.flatten_mapping(node)  # <<: *anchor
    branch = ConfigMapping(origin=origin)
    for key, value in node.value:
        name = loader.construct_object(key, deep=True)
        line = f"{file}:{key.start_mark.line + 1}"
        if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
            text = key.value if isinstance(key, yaml.ScalarNode) else ""
            raise RecipeError(Problem(text, "wrong-type", "got a key that is not a string; expected quotes around it", line))
        if name == REPLACES:
            branch.replaces = loader.construct_object(value) is True
            continue
        child = _tree(loader, value, file, (*above, node))
        child.origin = line
        branch.children[str(name)] = child
    return branch


def _insist_on_plain(value: Any, origin: str, key: str = "", depth: int = 0) -> None:
    """Raise RecipeError for values that a recipe cannot have: sets, bytes and the like, and values nested too deeply."""
    if depth > DEEPEST:
        message = f"got a value nested more than {DEEPEST} levels deep; expected a flatter value"
        raise RecipeError(Problem(key, "too-large", message, origin))
    if isinstance(value, list | dict):
        for item in value if isinstance(value, list) else [*value, *value.values()]:
            _insist_on_plain(item, origin, key, depth + 1)
    elif not isinstance(value, str | int | float | None):
        message = f"got a {type(value).__name__}; expected a string, a number, true, false, null, a list or a mapping"
        raise RecipeError(Problem(key, "wrong-type", message, origin))


def short_path(path: Path) -> str:
    """Return the path relative to the working directory or the checkout if it is inside one of them."""
    absolute = Path(os.path.abspath(path))
    for folder in (Path.cwd(), ROOT):
        if absolute.is_relative_to(folder):
            return str(absolute.relative_to(folder))
    return str(absolute)


def parse_overrides(arguments: Iterable[str]) -> Iterator[tuple[str, ConfigNode]]:
    """Yield (dotted key, node) for each `key=value`. Raise RecipeError for other arguments."""
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not all(key.split(".")) or len(key) > LONGEST_KEY:
            text = _shortened(key if equals else argument)
            raise RecipeError(Problem(text, "bad-format", "expected key=value with a dotted key", COMMAND_LINE))
        try:
            value = parse_value(text)
        except ValueError as error:
            raise RecipeError(Problem(key, "bad-format", str(error), COMMAND_LINE)) from None
        _insist_on_plain(value, COMMAND_LINE, key)
        node = from_plain(value, COMMAND_LINE)
        for branch in node.mappings() if isinstance(node, ConfigMapping) else ():
            if (replaces := branch.children.pop(REPLACES, None)) is not None:
                branch.replaces = isinstance(replaces, ConfigValue) and replaces.value is True
        yield key, node


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:76]} ..."
