"""Resolve a tree in foreign keys, and turn its translation into layers of our keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.recipes.translation.translator import Translation
from pipeline.config import Problem, Recipe, config_tree, independent, interpolation, schema_validation, unused_keys
from pipeline.config.config_tree import ConfigMapping, ConfigNode
from pipeline.config.loading import Layers, layer

Pairs = list[tuple[str, ConfigNode]]


@dataclass(frozen=True)
class ResolvedTree:
    """A foreign recipe without its faulty values."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]  # dotted key -> "file:line"
    environment: Mapping[str, str]  # resolved value from the environment -> the value as written
    faults: Mapping[str, Problem]  # dotted key -> its problem; `values` lacks the key


def resolve(tree: ConfigMapping, check: Callable[[ConfigMapping], Mapping[str, Problem]] | None = None) -> ResolvedTree:
    """Resolve the interpolations of a tree, in place. check: returns key -> problem for values of a wrong type."""
    named: dict[str, Any] = {}
    faults = interpolation.resolve(tree, named)
    leaves = {key: leaf.value for key, leaf in tree.leaves() if key in named}
    environment = {value: str(named[key]) for key, value in leaves.items() if isinstance(value, str)}
    if check is not None:
        faults |= {key: problem for key, problem in check(tree).items() if key not in faults}
    faults = {key: replace(problem, origin=getattr(tree.find(key), "origin", None) or "") for key, problem in faults.items()}
    for key in faults:
        tree.drop(key)
    return ResolvedTree(tree.plain(), {key: leaf.origin or "" for key, leaf in tree.leaves()}, environment, faults)


def as_layers(
    tree: ResolvedTree,
    translation: Translation,
    path: Path,
    ours: Pairs,
    problems: Iterable[Problem] = (),
    default_origin: str = "",
) -> Layers:
    """Return the layers of a translated recipe.

    ours: our keys on the command line. problems: more of them. default_origin: the origin of values that no key of the recipe
    sets; default: the recipe's file.
    """
    found = [*tree.faults.values(), *independent(translation.problems, tree.faults), *problems]
    shown = config_tree.short_path(path)
    values: dict[str, Any] = interpolation.escaped(translation.layer)
    translated = config_tree.from_plain(values, default_origin or shown, translation.origins)
    notes = [*translation.changed, *translation.ignored]
    faulty = [problem.key for problem in found]
    return Layers([translated, layer(ours)], notes, found, faulty, dict(tree.environment))


def without_effect(tree: ConfigMapping, keys: Iterable[str]) -> Iterable[Problem]:
    """Yield a problem for each key of the command line that its recipe does not read. tree: in keys that are ours too."""
    readers = replace(unused_keys.Readers.of_tree(tree), algorithm=None)  # the reader finds the algorithm
    for key in keys:
        if reason := readers.unread(key):
            yield Problem(key, "has-no-effect", f"{reason}; {readers.instead(key)}", config_tree.COMMAND_LINE)


def is_our_key(key: str) -> bool:
    """Return whether a dotted key is one of Hetstep's."""
    tree = layer([(key, config_tree.ConfigValue(None))])
    return not list(schema_validation.unknown_keys(Recipe, tree))
