"""Load a recipe from layers: the schema's defaults, `defaults:` parents, its YAML, `key=value` on the command line.

Later layers override earlier ones. All problems are collected: an unusable value is replaced by its default, so that the other
values can be checked. A caller may pass a function that reads the recipes of other projects: `launch/recipes/foreign.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import (
    config_tree,
    fixed_keys,
    interpolation,
    paths,
    schema_validation,
    unused_keys,
    user_algorithm,
    yaml_text,
)
from pipeline.config.config_tree import RECIPES, ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.recipe_checks import contradictions
from pipeline.config.schema import Recipe, recipe_class
from pipeline.config.user_algorithm import MayImport
from pipeline.recipe.problems import Problem, RecipeError, refuse


@dataclass(frozen=True)
class Layers:
    """The trees from which a recipe is merged, lowest first, with notes and problems."""

    trees: list[ConfigMapping]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    faulty: list[str] = field(default_factory=list)  # keys whose value could not be used
    environment: dict[str, str] = field(default_factory=dict)  # values from the environment that are resolved -> as written


ReadForeign = Callable[[Path, Sequence[str]], Layers | None]
"""(path of a recipe, arguments of the command line) -> layers in our keys; None for a recipe of ours."""


@dataclass(frozen=True)
class Loaded:
    """A recipe with its problems and notes."""

    recipe: Recipe  # with defaults at the keys in `faulty`
    problems: list[Problem]
    origins: dict[str, str]  # dotted key -> "recipes/a.yaml:12" or "the command line"; absent: the schema's default
    notes: list[str] = field(default_factory=list)  # what the translation of a foreign recipe changed or ignored
    faulty: frozenset[str] = frozenset()  # keys whose value could not be used
    inherited: tuple[str, ...] = ()  # overrides that a needed recipe inherits from the one that needs it
    references: dict[str, set[str]] = field(default_factory=dict)  # key -> keys that its value refers to
    file: str = ""  # the recipe's file, as in `origins`; empty for a foreign recipe
    from_environment: dict[str, Any] = field(default_factory=dict)  # key -> the value as written, with `${oc.env:NAME}`

    def unread(self, recipe: Recipe) -> tuple[list[Problem], list[str]]:
        """Return (problems, notes) about keys that nothing reads. recipe: this recipe with the chosen backend."""
        given = recipe, self.origins, self.references
        problems = list(unused_keys.problems(*given))
        if not self.file:
            return problems, []
        return [*problems, *unused_keys.problems_of_files(*given, self.file)], list(unused_keys.notes(*given, self.file))


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return a complete and checked recipe. Raise RecipeError with all problems.

    name: a name in recipes/, or a path to a YAML file. overrides: texts `key=value`.
    """
    loaded = inspect(name, overrides)
    refuse(loaded.problems)
    return loaded.recipe


def inspect(
    name: str,
    overrides: Iterable[str] = (),
    read_foreign: ReadForeign | None = None,
    above: Sequence[ConfigMapping] = (),
    may_import: MayImport = lambda path, folders: None,
) -> Loaded:
    """Return the recipe that `load` returns, together with its problems.

    Raise RecipeError if a file cannot be read, if an override is no `key=value`, or if no recipe remains without the unusable
    values. above: layers between the file and the overrides. read_foreign: a function that reads the recipes of other projects
    (`launch/recipes/foreign.py`). may_import: decides whether the class of a user's algorithm is imported; without it, only
    those that are registered can be used.
    """
    overrides = list(overrides)
    if read_foreign is not None:
        path = find(name, foreign=True)
        if (layers := read_foreign(path, overrides)) is not None:
            return _read(path, layers, may_import)
    path = find(name)
    given = Layers([*config_tree.load_layers(path), *above, layer(list(config_tree.parse_overrides(overrides)))])
    return dataclasses.replace(_read(path, given, may_import), file=config_tree.short_path(path))


def read(path: Path, may_import: MayImport | None = None) -> Recipe:
    """Return the recipe that `write` saved in a run folder. Raise RecipeError if it is not valid.

    may_import: None: a stand-in takes the place of a user's algorithm.

    `write` saves resolved values. A reference to an environment variable is a later edit of the file, and is refused.
    """
    tree = config_tree.load_with_parents(path)
    for _, leaf in tree.leaves():
        leaf.folder = None  # older versions wrote paths relative to the working directory
    fixed_keys.leave_out(tree)
    with interpolation.without_environment():
        return _resolved(tree, may_import)


def complete(values: dict[str, Any]) -> Recipe:
    """Return the recipe with nested `values` over the schema's defaults, resolved and checked. Raise RecipeError."""
    loaded = _inspected(config_tree.from_plain(values, None))
    refuse(loaded.problems)
    return loaded.recipe


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a copy of the recipe with other values at some dotted keys. Raise RecipeError if it is not valid.

    values: dotted key -> plain value. Other scalars at keys that exist take a millisecond: a plan makes many copies.
    """
    plain = dataclasses.asdict(recipe)
    for key, value in values.items():
        *sections, last = key.split(".")
        section = functools.reduce(lambda outer, name: outer.get(name) if isinstance(outer, dict) else None, sections, plain)
        is_plain = isinstance(value, interpolation.SCALARS) and not interpolation.interpolated(value)
        if not is_plain or not isinstance(section, dict) or last not in section:
            above = layer([(key, ConfigValue(value, config_tree.COMMAND_LINE)) for key, value in values.items()])
            loaded = examined(recipe, above)
            refuse(loaded.problems)
            return loaded.recipe
        section[last] = value
    new, wrong = schema_validation.validate(type(recipe), plain)
    refuse(wrong)
    refuse(contradictions(new))
    return new


def examined(recipe: Recipe, above: ConfigMapping) -> Loaded:
    """Return a recipe with the layer `above` over its values, and its problems. The schema's defaults do not apply."""
    tree = config_tree.merge(config_tree.from_plain(_written(recipe), None), above)
    for branch in tree.mappings():
        branch.replaces = True
    return _inspected(tree)


def write(recipe: Recipe, path: Path) -> None:
    """Write a recipe as YAML for `read`."""
    path.write_text(to_yaml(recipe))


def to_yaml(recipe: Recipe) -> str:
    """Return YAML from which `read` makes the same recipe."""
    return yaml_text.dump(_written(recipe))


def _written(recipe: Recipe) -> dict[str, Any]:
    return interpolation.escaped(dataclasses.asdict(recipe))


def _resolved(tree: ConfigMapping, may_import: MayImport | None) -> Recipe:
    """Return the recipe of a tree that sets every key. Raise RecipeError if it is not valid.

    If the tree lacks a key, somebody removed it on purpose, so its default does not apply.
    """
    for branch in tree.mappings():
        branch.replaces = True
    loaded = _inspected(tree, may_import=may_import)
    refuse(loaded.problems)
    return loaded.recipe


def find(name: str, foreign: bool = False) -> Path:
    """Return the file of a recipe. Raise RecipeError with the names of the recipes. foreign: accept what is not YAML."""
    path = config_tree.find_file(name, RECIPES, "recipe", any_kind=foreign)
    if path.stem in (".", ".."):
        message = f"got a file called {path.name}; expected a file name that can also name the run's folder. Rename the file"
        raise RecipeError(Problem("recipe", "bad-format", message))
    return path


def name_of(recipe: str) -> str:
    """Return the name of a recipe that is given by name, such as `tiny_sft`, or by path."""
    return re.sub(r"\.(yaml|yml|toml|sh)$", "", Path(recipe).name)


def independent(problems: Iterable[Problem], faulty: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems that do not follow from a faulty key.

    A problem follows from a faulty key if it names the key, a key inside it, or a section around it.
    """
    for problem in problems:
        named = {problem.key, *re.findall(r"(?<![\w./-])[A-Za-z_]\w*(?:\.\w+)+", problem.message)}
        if not any(interpolation.overlap(key, bad) for bad in faulty for key in named if key):
            yield problem


# ---- layers ---------------------------------------------------------------------------------------------------------------


def layer(given: list[tuple[str, ConfigNode]]) -> ConfigMapping:
    """Return one tree with all keys on the command line."""
    tree = ConfigMapping()
    for key, node in given:
        one = ConfigMapping()
        one.set(key, node)
        tree = config_tree.merge(tree, one)
    return tree


def _read(path: Path, given: Layers, may_import: MayImport) -> Loaded:
    tree = ConfigMapping({"name": ConfigValue(path.stem), "run_dir": ConfigValue(f"runs/{path.stem}")})
    for one in given.trees:
        paths.with_one_source(tree, one)
        tree = config_tree.merge(tree, one)
    problems, faulty = given.problems, given.faulty
    if lacking := paths.find_needs(tree):
        problems, faulty = [*problems, *lacking], [*faulty, "needs"]
        tree.drop("needs")
    paths.add_module_folders(tree, path)
    loaded = _inspected(tree, given.notes, problems, faulty, may_import)
    if given.environment:
        leaves = config_tree.from_plain(dataclasses.asdict(loaded.recipe), None).leaves()
        found = {
            key: given.environment[leaf.value]
            for key, leaf in leaves
            if isinstance(leaf.value, str) and leaf.value in given.environment
        }
        loaded.from_environment.update(found)
    return loaded


# ---- from a tree to a recipe ----------------------------------------------------------------------------------------------


def _inspected(
    given: ConfigMapping,
    notes: Iterable[str] = (),
    problems: Iterable[Problem] = (),
    faulty: Iterable[str] = (),
    may_import: MayImport | None = None,
) -> Loaded:
    """Return the recipe of the tree `given` over the schema's defaults, with its problems.

    Unusable values are dropped until the rest is usable. notes, problems, faulty: those of earlier steps, which are included.
    """
    found_problems, faulty = list(problems), set(faulty)
    if wrong := user_algorithm.register(given, may_import, schema_validation.fields(recipe_class(""))):
        found_problems.append(wrong)
        faulty |= {"algorithm", *_leave_out_algorithm(given)}
    schema = recipe_class(getattr(given.find("algorithm"), "value", ""))
    whole = _whole(given, schema)
    readers = unused_keys.Readers.of_tree(whole)
    for problem in schema_validation.unknown_keys(schema, whole, advice=readers):
        found_problems.append(problem)
        faulty.add(problem.key)
    origins = {key: leaf.origin for key, leaf in given.leaves() if leaf.origin}
    from_environment: dict[str, Any] = {}
    while True:
        from_environment.clear()
        recipe, found = _attempt(given, schema, faulty, readers, from_environment)
        if not found:
            break
        found_problems += filter(None, found.values())
        faulty |= found.keys()
        for key in found:
            _leave_out(given, key)
    if not recipe:  # dropping values did not help
        raise RecipeError(*found_problems)
    references = {key: found for key, leaf in whole.leaves() if (found := interpolation.references(key, leaf.value))}
    found_problems += independent(contradictions(recipe), interpolation.dependent(faulty, references))
    unique = list(dict.fromkeys(found_problems))
    named = {"references": references, "from_environment": from_environment}
    return Loaded(recipe, unique, origins, [*notes, *fixed_keys.notes(origins)], frozenset(faulty), **named)


def _leave_out_algorithm(given: ConfigMapping) -> list[str]:
    """Drop a user's algorithm that cannot be used, and its section, whose keys are unknown. Return the section's key."""
    name = str(getattr(given.find("algorithm"), "value", "")).split(".")[-2:][0]
    for key in ("algorithm", "algorithm_class", name):
        if given.find(key):
            given.drop(key)
    return [name]


def _whole(given: ConfigMapping, schema: type[Any]) -> ConfigMapping:
    """Return a tree with the schema's defaults, in which copies of sections replace the references to them."""
    tree = schema_validation.with_defaults(schema, given)
    return schema_validation.with_defaults(schema, tree) if interpolation.expand(tree) else tree


def _attempt(
    given: ConfigMapping,
    schema: type[Any],
    faulty: set[str],
    readers: unused_keys.Readers,
    from_environment: dict[str, Any],
) -> tuple[Recipe | None, dict[str, Problem | None]]:
    """Return (recipe, {key of an unusable value: its problem}). The recipe is None if unusable values prevent it.

    A problem is None if it only follows from a key in `faulty`. from_environment: as in `interpolation.resolve`.
    """
    tree = _whole(given, schema)
    faults = paths.absolute(tree)
    written = {key: leaf for key, leaf in tree.leaves() if interpolation.interpolated(leaf.value)}
    unresolved = interpolation.resolve(tree, from_environment)
    faults |= paths.absolute(tree, {key: leaf.folder for key, leaf in written.items()})
    if any(isinstance(tree.find(key), ConfigMapping) for key in written):
        tree = schema_validation.with_defaults(schema, tree)
    recipe, wrong = schema_validation.validate_tree(schema, tree)
    wrong += fixed_keys.problems(tree, readers.backend)
    faults |= {problem.key: problem for problem in wrong} | unresolved
    faults = {key: problem for key, problem in faults.items() if key not in faulty}

    def follows(key: str, others: Iterable[str]) -> bool:
        referred = interpolation.references(key, written[key].value) if key in written else ()
        return any(f"{name}.".startswith(f"{other}.") for name in referred for other in others if other != key)

    def problem(key: str) -> Problem | None:
        if follows(key, faulty):
            return None
        node, message = tree.find(key), faults[key].message
        if key in written and key not in unresolved:
            message += f". It comes from {written[key].value}"
        inside = node.leaves(f"{key}.") if isinstance(node, ConfigMapping) else ()
        hints = dict.fromkeys(hint for inner, _ in inside if (hint := readers.hint(inner)))
        return dataclasses.replace(
            faults[key], message="; ".join([message, *hints]), origin=(node.origin or "") if node else ""
        )

    roots = [key for key in faults if not follows(key, faults)]
    roots = roots or [key for key in faults if given.find(key)] or list(faults)  # a circle: the keys that were given
    return recipe, {key: problem(key) for key in roots}


def _leave_out(given: ConfigMapping, key: str) -> None:
    """Drop a key's value from the tree, so that the schema's default, if there is one, applies.

    If the key is inside a section that is a reference to another one, drop this reference.
    """
    around = key
    while around and given.find(around) is None:
        around = around.rpartition(".")[0]
    if around and (
        around == key or isinstance(given.find(around), ConfigValue)
    ):  # a section given as a reference to another one
        given.drop(around)
