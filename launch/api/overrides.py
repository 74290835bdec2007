"""Turn the keys that a caller of the API gives into `key=value` of the command line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pipeline.config import Problem, RecipeError, config_tree, formatting

Overrides = Mapping[str, Any]
"""Dotted keys with their values, `{"grpo.seed": 3}`, or nested ones, `{"grpo": {"seed": 3}}`."""


def arguments(overrides: Overrides | None, keywords: Mapping[str, Any]) -> list[str]:
    """Return `key=value` arguments. A keyword has `__` for each dot, and wins over the same key in `overrides`.

    Raises RecipeError for keys that are not texts, and for values that a recipe cannot hold.
    """
    values = flat(overrides or {})
    values |= dict(_flat("", {name.replace("__", "."): value for name, value in keywords.items()}))
    return [f"{key}={formatting.on_one_line(value)}" for key, value in values.items()]


def flat(overrides: Overrides) -> dict[str, Any]:
    """Return dotted key -> value. Raises RecipeError as `arguments` does."""
    return dict(_flat("", overrides))


@contextlib.contextmanager
def naming_arguments(keywords: Mapping[str, Any] = {}) -> Iterator[None]:
    """Make the problems of a RecipeError in the block name the call's arguments as their origin.

    Otherwise they would name the command line, which the caller did not use.
    """
    try:
        yield
    except RecipeError as error:
        error.problems = tuple(at_argument(problem, keywords) for problem in error.problems)
        error.args = ("\n".join(map(str, error.problems)),)
        raise


def at_argument(problem: Problem, keywords: Mapping[str, Any] = {}) -> Problem:
    """Replace the origin of a problem of the command line by the call's argument that set its key, and return the problem.

    Any other problem is returned unchanged.
    """
    if not problem.origin.endswith(config_tree.COMMAND_LINE):
        return problem
    dotted = {name: f"{name.replace('__', '.')}." for name in keywords}
    key = f"{problem.key}."
    of_keyword = (name for name, prefix in dotted.items() if key.startswith(prefix) or prefix.startswith(key))
    argument = f"the argument {next(of_keyword, 'overrides')}"
    return replace(problem, origin=problem.origin.removesuffix(config_tree.COMMAND_LINE) + argument)


def _flat(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, plain value). A mapping that replaces another one (`_override_`) stays whole, as a value."""
    if not isinstance(values, Mapping):
        raise RecipeError(Problem("overrides", "wrong-type", f"got a {type(values).__name__}; expected a mapping of keys"))
    for name, value in values.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise RecipeError(Problem(prefix + str(name), "bad-format", f"got the key {name!r}; expected a dotted key"))
        key = prefix + name
        if isinstance(value, Mapping) and value and config_tree.REPLACES not in value:
            yield from _flat(f"{key}.", value)
        else:
            yield key, _plain(key, value)


def _plain(key: str, value: Any) -> Any:
    """Return a value in the form that recipes hold: paths as texts, tuples as lists, NumPy numbers as Python numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # subclasses too, such as enums and NumPy's float64
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(key, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    if callable(item := getattr(value, "item", None)) and not getattr(value, "shape", ()):
        return _plain(key, item())
    expected = "a string, a path, a number, True, False, None, a list or a mapping"
    raise RecipeError(Problem(key, "wrong-type", f"got a {type(value).__name__}; expected {expected}"))
