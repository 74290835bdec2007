"""Format a recipe and its values as YAML, with the origin of each value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from pipeline.config import yaml_text
from pipeline.config.interpolation import escaped
from pipeline.config.loading import Loaded

WIDEST = 80  # columns; longer lines do not shift the comments of the others
DEFAULT = "default"


def format_with_origins(loaded: Loaded) -> str:
    """Return the recipe as YAML. A comment gives each value's origin: file and line, the command line, or `default`."""
    lines = list(_lines("", dataclasses.asdict(loaded.recipe), loaded.origins, 0))
    column = max(len(text) for text, _ in lines if len(text) <= WIDEST)
    return "".join(f"{text:{column}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def format_override(key: str, value: Any) -> str:
    """Return `key=value` in the form of the command line, without the shell's quotes."""
    return f"{key}={on_one_line(escaped(value))}"


def _lines(prefix: str, values: dict[str, Any], origins: dict[str, str], depth: int) -> Iterator[tuple[str, str | None]]:
    """Yield (line of YAML, origin of its value) for nested values."""
    for name, value in values.items():
        key, head = f"{prefix}{name}", f"{'  ' * depth}{on_one_line(name)}:"
        if isinstance(value, dict) and value:
            yield head, None
            yield from _lines(f"{key}.", value, origins, depth + 1)
        else:
            yield f"{head} {on_one_line(escaped(value))}", _origin(key, origins)


def on_one_line(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # a YAML text in double quotes
    return yaml_text.dump(value, on_one_line=True).removesuffix("\n...\n").removesuffix("\n")


def _origin(key: str, origins: dict[str, str]) -> str:
    """Return the origin of a key or, if it has none, of the nearest mapping around it that was set as a whole."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT
