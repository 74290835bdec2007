"""Read Hydra's overrides `key=value`, `+key=value`, `++key=value` and `~key` (https://hydra.cc, "The override grammar")."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.config import Problem, RecipeError, config_tree
from pipeline.config.config_tree import ConfigMapping, ConfigNode
from pipeline.config.yaml_text import parse_value

OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """An override of one key."""

    key: str
    node: ConfigNode | None  # None: the key is deleted


def parse(words: Iterable[tuple[str, str]]) -> list[Override]:
    """Return the overrides among (word, origin) pairs. Raises RecipeError for a word that is none."""
    found = []
    for word, origin in words:
        match = OVERRIDE.fullmatch(word)
        if match is None or (match[3] is None and match[1] != "~"):
            message = f"got '{word[:80]}'; expected an override of Hydra, such as key=value, +key=value or ~key"
            raise RecipeError(Problem(word[:80], "bad-format", message, origin))
        node = None if match[1] == "~" else config_tree.from_plain(_value(match[3]), origin)
        found.append(Override(match[2], node))
    return found


def _value(text: str) -> Any:
    """Return the value of the text after `=`. Hydra reads `{a:1}` as a mapping, and most else as YAML does."""
    if text.startswith("{"):
        text = re.sub(r"([\w.'\"-]):(?=[^\s/])", r"\1: ", text)
    try:
        return parse_value(text)
    except ValueError:
        return text  # which a key that needs another type refuses


def apply(tree: ConfigMapping, overrides: Iterable[Override]) -> ConfigMapping:
    """Return the tree with the overrides, in order."""
    for one in overrides:
        if one.node is None:
            tree.drop(one.key)
        else:
            layer = ConfigMapping()
            layer.set(one.key, one.node)
            tree = config_tree.merge(tree, layer)
    return tree
