"""Read a recipe of NeMo-RL, and return it as layers of our keys with the problems and notes of its translation."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.recipes import nemo_rl
from launch.recipes.nemo_rl import environment_keys
from pipeline.config import Problem, Recipe, config_tree, independent, interpolation, schema_validation, unused_keys
from pipeline.config.config_tree import ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.loading import Layers, layer
from pipeline.config.schema import DatasetConfig


def read(path: Path, tree: ConfigMapping, overrides: list[tuple[str, ConfigNode]]) -> Layers:
    """Translate a NeMo-RL recipe into our keys.

    overrides: (key, value) pairs. A key is NeMo-RL's if the recipe's files have it, else ours.
    """
    theirs = [pair for pair in overrides if tree.find(pair[0]) is not None]
    tree = config_tree.merge(tree, layer(theirs))
    named: dict[str, Any] = {}
    faults = interpolation.resolve(tree, named)
    leaves = {key: leaf.value for key, leaf in tree.leaves() if key in named}
    environment = {value: str(named[key]) for key, value in leaves.items() if isinstance(value, str)}
    faults |= {key: problem for key, problem in _type_errors(tree).items() if key not in faults}
    problems = [replace(problem, origin=getattr(tree.find(key), "origin", None) or "") for key, problem in faults.items()]
    for key in faults:
        tree.drop(key)
    origins = {key: leaf.origin or "" for key, leaf in tree.leaves()}
    translation = nemo_rl.translate(tree.plain(), origins, path)
    problems += independent(translation.problems, faults)
    readers = replace(unused_keys.Readers.of_tree(tree), algorithm=None)  # `nemo_rl` finds the algorithm
    for key, _ in theirs:
        if reason := readers.unread(key):
            problems.append(Problem(key, "has-no-effect", f"{reason}; {readers.instead(key)}", config_tree.COMMAND_LINE))
    ours = config_tree.from_plain(interpolation.escaped(translation.layer), config_tree.short_path(path), translation.origins)
    trees = [ours, layer([pair for pair in overrides if pair not in theirs])]
    return Layers(
        trees, [*translation.changed, *translation.ignored], problems, [problem.key for problem in problems], environment
    )


def _type_errors(tree: ConfigMapping) -> dict[str, Problem]:
    """Return key -> problem, for missing values, and for values of another type than our key of the same name has."""
    problems = _coerce_types(Recipe, tree)
    for key, leaf in tree.leaves():
        if leaf.value == schema_validation.MISSING:
            problems[key] = Problem(key, "missing-value", "got no value; expected a value, since the key has no default")
    for key in ("data.train", "data.validation"):  # lists of data sets are valid there
        value = getattr(tree.find(key), "value", None)
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            problems.pop(key)
    for name in environment_keys.SWITCHES:
        problems.pop(f"env.{name}", None)
    key, default = "data.default", tree.find("data.default")
    if isinstance(default, ConfigMapping):
        inside = _coerce_types(DatasetConfig, default)
        return problems | {f"{key}.{name}": replace(problem, key=f"{key}.{name}") for name, problem in inside.items()}
    if default and default.value is not None:
        problems[key] = Problem(key, "wrong-type", f"got {default.value!r}; expected a mapping of keys")
    return problems


def _coerce_types(section: type, tree: ConfigMapping) -> dict[str, Problem]:
    """Convert values to the types of the schema, in place, such as a quoted number to a number.

    Unknown keys and null are skipped. Return key -> problem for the values that have a wrong type.
    """
    known = tree.copy()
    for key, leaf in tree.leaves():
        if leaf.value in (None, schema_validation.MISSING):
            known.drop(key)
    problems = {problem.key: problem for problem in schema_validation.validate_tree(section, known)[1]}
    for key in problems:
        known.drop(key)
    values = config_tree.from_plain(asdict(schema_validation.validate_tree(section, known)[0]), None)
    for key, _ in known.leaves():
        node, own = values.find(key), tree.find(key)
        if isinstance(node, ConfigValue) and isinstance(own, ConfigValue):
            own.value = node.value
    return {key: problem for key, problem in problems.items() if problem.code == "wrong-type"}
