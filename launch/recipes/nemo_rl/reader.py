"""Read a recipe of NeMo-RL, and return it as layers of our keys with the problems and notes of its translation."""

from __future__ import annotations

from dataclasses import asdict, replace

from launch.recipes import nemo_rl
from launch.recipes.foreign import ForeignSource
from launch.recipes.nemo_rl import environment_keys
from launch.recipes.translation import foreign_tree
from pipeline.config import Problem, Recipe, config_tree, schema_validation
from pipeline.config.config_tree import ConfigMapping, ConfigValue
from pipeline.config.loading import Layers, layer
from pipeline.config.schema import DatasetConfig


def read(source: ForeignSource) -> Layers:
    """Translate a NeMo-RL recipe into our keys. An argument's key is NeMo-RL's if the recipe's files have it, else ours."""
    theirs = [pair for pair in source.pairs if source.merged.find(pair[0]) is not None]
    merged = config_tree.merge(source.merged, layer(theirs))
    tree = foreign_tree.resolve(merged, _type_errors)
    translation = nemo_rl.translate(tree.values, tree.origins, source.path)
    unread = foreign_tree.without_effect(merged, [key for key, _ in theirs])
    return foreign_tree.as_layers(tree, translation, source.path, [pair for pair in source.pairs if pair not in theirs], unread)


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
