"""Read a recipe: the schema's defaults <- `defaults:` parents <- its YAML <- `key=value` from the command line.

All problems are collected: a value that cannot be used is left at its default, so that the rest can be checked. NeMo-RL
recipes, which have no `algorithm`, have to be translated first: `launch/nemo_rl/`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.algorithms import OFFLINE, ONLINE
from pipeline.config import config_tree, interpolation, paths, schema_validation, unused_keys
from pipeline.config.checks import contradictions
from pipeline.config.config_tree import RECIPES, ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.schema import Recipe
from pipeline.problems import Problem, RecipeError, refuse

OURS = ("cluster.train", "cluster.generate", "cluster.executor", "cluster.time_min", "run_dir", "needs")  # not NeMo-RL's
THEIRS = ("cluster.num_nodes", "cluster.gpus_per_node", *ONLINE, *OFFLINE)  # one of these at least they all have


@dataclass(frozen=True)
class Layers:
    """The trees that a recipe is merged from, the later over the earlier, with notes and problems."""

    trees: list[ConfigMapping]
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    faulty: list[str] = field(default_factory=list)  # keys whose value could not be used


Translate = Callable[[Path, ConfigMapping, list[tuple[str, ConfigNode]]], Layers]
"""From a NeMo-RL recipe, its merged tree and what the command line sets, to layers in our keys."""


@dataclass(frozen=True)
class Loaded:
    """A recipe with its problems and notes."""

    recipe: Recipe  # with the default in place of what `faulty` names
    problems: list[Problem]
    origins: dict[str, str]  # dotted key -> "recipes/a.yaml:12" or "the command line"; absent: the schema's default
    notes: list[str] = field(default_factory=list)  # what was changed or ignored in a recipe of NeMo-RL's
    faulty: frozenset[str] = frozenset()  # keys whose value could not be used
    inherited: tuple[str, ...] = ()  # of a recipe that is needed: the overrides that it takes from the one that needs it
    references: dict[str, set[str]] = field(default_factory=dict)  # by key the keys that its value is made of
    file: str = ""  # the recipe's own, as origins name it; empty for one of NeMo-RL's

    def unread(self, recipe: Recipe) -> tuple[list[Problem], list[str]]:
        """Return (problems, notes) on keys that nothing reads. recipe: this one, with the backend that was chosen."""
        problems = unused_keys.problems(recipe, self.origins, self.references)
        return list(problems), list(unused_keys.notes(recipe, self.origins, self.references, self.file) if self.file else ())


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe `name` (in recipes/, or a path to a YAML file) with `key=value` overrides, complete and checked.

    Raise RecipeError with all problems.
    """
    loaded = inspect(name, overrides)
    refuse(loaded.problems)
    return loaded.recipe


def inspect(name: str, overrides: Iterable[str] = (), translate: Translate | None = None) -> Loaded:
    """Return the recipe as `load` does, with its problems. Raise RecipeError only for a file that cannot be read at all.

    translate: makes layers of ours of a NeMo-RL recipe: `launch/nemo_rl/`. Without it such a recipe raises RecipeError.
    """
    path = find(name)
    stack = config_tree.load_layers(path)
    tree = functools.reduce(config_tree.merge, stack, ConfigMapping())
    given = list(config_tree.parse_overrides(overrides))
    if not is_nemo_rls(tree, given):
        return dataclasses.replace(_read(path, Layers([*stack, layer(given)])), file=config_tree.short_path(path))
    if translate is None:
        told = f"got a recipe of NeMo-RL's ({path}). Try `python launch/submit.py recipe={name}`, which translates it"
        raise RecipeError(Problem("algorithm", "nemo-rl-recipe", told))
    return _read(path, translate(path, tree, given))


def read(path: Path) -> Recipe:
    """Return a resolved recipe as `write` left it in a run folder. Raise RecipeError."""
    tree = config_tree.load_with_parents(path)
    for _, leaf in tree.leaves():
        leaf.folder = None  # older versions wrote paths that are relative to the working directory
    return _resolved(tree)


def complete(values: dict[str, Any]) -> Recipe:
    """Return the recipe of these nested values, with the schema's defaults, resolved and checked. Raises RecipeError."""
    loaded = _inspected(config_tree.from_plain(values, None))
    refuse(loaded.problems)
    return loaded.recipe


def changed(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other values at some dotted keys, checked. Raises RecipeError."""
    tree = config_tree.from_plain(_written(recipe), None)
    for key, value in values.items():
        tree.set(key, ConfigValue(value))
    return _resolved(tree)


def write(recipe: Recipe, path: Path) -> None:
    path.write_text(to_yaml(recipe))


def to_yaml(recipe: Recipe) -> str:
    """Return YAML from which `read` makes the same recipe."""
    return config_tree.dump_yaml(_written(recipe))


def _written(recipe: Recipe) -> dict[str, Any]:
    return interpolation.escaped(dataclasses.asdict(recipe))


def _resolved(tree: ConfigMapping) -> Recipe:
    """Return the recipe of a tree that gives everything: a default that it does not have was taken away. Raises RecipeError."""
    for branch in tree.mappings():
        branch.replaces = True
    loaded = _inspected(tree)
    refuse(loaded.problems)
    return loaded.recipe


def find(name: str) -> Path:
    """Return the file of a recipe. Raise RecipeError with the recipes that exist."""
    path = config_tree.find_file(name, RECIPES, "recipe")
    if path.stem in (".", ".."):
        message = f"got a file called {path.name}; expected a name for the run's folder. Rename the file"
        raise RecipeError(Problem("recipe", "bad-format", message))
    return path


def name_of(recipe: str) -> str:
    """Return the name of a recipe that is given by its name, as `tiny_sft`, or by the path of a file."""
    return Path(recipe).name.removesuffix(".yaml")


def independent(problems: Iterable[Problem], faulty: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems that do not merely follow from a faulty key.

    They name neither it, nor a key in it, nor a section around it.
    """
    for problem in problems:
        named = {problem.key, *re.findall(r"(?<![\w./-])[A-Za-z_]\w*(?:\.\w+)+", problem.message)}
        if not any(interpolation.overlap(key, bad) for bad in faulty for key in named if key):
            yield problem


# ---- layers ---------------------------------------------------------------------------------------------------------------


def layer(given: list[tuple[str, ConfigNode]]) -> ConfigMapping:
    """Return one tree of the keys that the command line gives."""
    tree = ConfigMapping()
    for key, node in given:
        one = ConfigMapping()
        one.set(key, node)
        tree = config_tree.merge(tree, one)
    return tree


def _read(path: Path, given: Layers) -> Loaded:
    tree = ConfigMapping({"name": ConfigValue(path.stem), "run_dir": ConfigValue(f"runs/{path.stem}")})
    for one in given.trees:
        paths.with_one_source(tree, one)
        tree = config_tree.merge(tree, one)
    problems, faulty = given.problems, given.faulty
    if lacking := paths.find_needs(tree):
        problems, faulty = [*problems, *lacking], [*faulty, "needs"]
        tree.drop("needs")
    paths.add_module_folders(tree, path)
    return _inspected(tree, given.notes, problems, faulty)


def is_nemo_rls(tree: ConfigMapping, given: list[tuple[str, ConfigNode]]) -> bool:
    """Return whether the files' keys are those of a NeMo-RL recipe. given: what the command line sets."""
    if difflib.get_close_matches("algorithm", [*tree.children, *(key for key, _ in given)], 1, schema_validation.SIMILAR):
        return False
    return not any(map(tree.find, OURS)) and any(map(tree.find, THEIRS))


# ---- from a tree to a recipe ----------------------------------------------------------------------------------------------


def _inspected(
    given: ConfigMapping, notes: Iterable[str] = (), problems: Iterable[str] = (), faulty: Iterable[str] = ()
) -> Loaded:
    """Return the recipe of a tree over the schema's defaults. Values that cannot be used are left out until the rest can."""
    problems, faulty = list(problems), set(faulty)
    whole = _whole(given)
    readers = unused_keys.Readers.of_tree(whole)
    for problem in schema_validation.unknown_keys(Recipe, whole, advice=schema_validation.Advice(readers.hint, readers.rank)):
        problems.append(problem)
        faulty.add(problem.key)
    origins = {key: leaf.origin for key, leaf in given.leaves() if leaf.origin}
    while True:
        recipe, found = _attempt(given, faulty, readers)
        if not found:
            break
        problems += filter(None, found.values())
        faulty |= found.keys()
        for key in found:
            _leave_out(given, key)
    if not recipe:  # leaving them out did not help
        raise RecipeError(*problems)
    references = {key: found for key, leaf in whole.leaves() if (found := interpolation.references(key, leaf.value))}
    problems += independent(contradictions(recipe), interpolation.dependent(faulty, references))
    return Loaded(recipe, list(dict.fromkeys(problems)), origins, list(notes), frozenset(faulty), references=references)


def _whole(given: ConfigMapping) -> ConfigMapping:
    """Return a tree with the schema's defaults, and with copies of the sections that others refer to."""
    tree = schema_validation.with_defaults(Recipe, given)
    return schema_validation.with_defaults(Recipe, tree) if interpolation.expand(tree) else tree


def _attempt(
    given: ConfigMapping, faulty: set[str], readers: unused_keys.Readers
) -> tuple[Recipe | None, dict[str, Problem | None]]:
    """Return the recipe, None where values keep it from being made, and by key the problems of values that cannot be used.

    The problem is None if it only follows from a key that is known to be faulty.
    """
    tree = _whole(given)
    faults = paths.absolute(tree)
    written = {key: leaf for key, leaf in tree.leaves() if interpolation.interpolated(leaf.value)}
    unresolved = interpolation.resolve(tree)
    faults |= paths.absolute(tree, {key: leaf.folder for key, leaf in written.items()})
    if any(isinstance(tree.find(key), ConfigMapping) for key in written):
        tree = schema_validation.with_defaults(Recipe, tree)
    recipe, wrong = schema_validation.validate_tree(Recipe, tree)
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
        return dataclasses.replace(faults[key], message="; ".join([message, *hints]), origin=node.origin or "")

    roots = [key for key in faults if not follows(key, faults)]
    roots = roots or [key for key in faults if given.find(key)] or list(faults)  # a circle: whoever was given a value
    return recipe, {key: problem(key) for key in roots}


def _leave_out(given: ConfigMapping, key: str) -> None:
    """Let the schema's default stand, or no value where it has none."""
    around = key
    while around and given.find(around) is None:
        around = around.rpartition(".")[0]
    if around and (
        around == key or isinstance(given.find(around), ConfigValue)
    ):  # a section that was given as a reference to another
        given.drop(around)
