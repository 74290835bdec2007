"""Check that values of a foreign recipe have the types of its project's defaults, with which a translation computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch.recipes.translation.translator import as_yaml
from pipeline.config import Problem
from pipeline.config.config_tree import ConfigMapping, ConfigValue

NAMES = {bool: "true or false", int: "a whole number", float: "a number"}


def replace_wrong(tree: ConfigMapping, examples: Mapping[str, Any], nullable: Mapping[str, Any] = {}) -> Iterator[Problem]:
    """Yield a problem for each value of a wrong type, and replace it, in place, by its example.

    examples: dotted key -> its default; only Booleans and numbers have a type to check. nullable: dotted key -> a value of the
    type of a key whose default is null.
    """
    for key, example in {**examples, **nullable}.items():
        node, kind = tree.find(key), type(example)
        if not isinstance(node, ConfigValue) or kind not in NAMES or (node.value is None and key in nullable):
            continue
        found: Any = node.value
        whole = isinstance(found, int) and not isinstance(found, bool)
        fits = {bool: isinstance(found, bool), int: whole, float: whole or isinstance(found, float)}[kind]
        if fits or (kind is int and isinstance(found, float) and found.is_integer()):
            if not fits:
                tree.set(key, ConfigValue(int(found), node.origin))
            continue
        yield Problem(key, "wrong-type", f"got {as_yaml(found)}; expected {NAMES[kind]}", node.origin or "")
        tree.set(key, ConfigValue(None if key in nullable else example, node.origin))
