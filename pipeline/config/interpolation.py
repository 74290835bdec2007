"""Resolve the interpolations `${...}` in a tree: other keys, OmegaConf's resolvers, and add, mul, div, max and if."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from omegaconf.resolvers import oc

from pipeline.config.config_tree import ConfigMapping, ConfigNode, ConfigValue
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING

REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")
COMPUTED_KEY = re.compile(r"\$\{[^}:]*\$\{|\$\{oc\.(?!env:)")  # refers to a key that only resolving it reveals
MOST_REFERENCES = 20
SCALARS = (str, int, float, bool, type(None))


def _number(value: Any) -> int | float:
    """Return a number unchanged. Raise TypeError for other values: a text times a large number could exhaust the memory."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"got {value!r}; expected a number")
    return value


RESOLVERS = {
    "add": lambda a, b: _number(a) + _number(b),
    "mul": lambda a, b: _number(a) * _number(b),
    "div": lambda a, b: _number(a) / _number(b),
    "max": lambda a, b: max(_number(a), _number(b)),
    "if": lambda condition, a, b: a if condition else b,
}


_open: ContextVar[bool] = ContextVar("environment", default=True)


_asked: ContextVar[list[str] | None] = ContextVar("asked", default=None)
"""A list that receives the name of each environment variable that is resolved; None: nobody collects the names."""


def _variable(name: str, *default: Any) -> Any:
    """Return an environment variable as OmegaConf's `oc.env` does. Raise PermissionError inside `without_environment`."""
    if not _open.get():
        raise PermissionError("no variable of the environment is resolved here")
    if (asked := _asked.get()) is not None:
        asked.append(name)
    return oc.env(name, *default)


@contextlib.contextmanager
def without_environment() -> Iterator[None]:
    """Refuse to resolve `oc.env` within the `with` block, even if other keys refer to it.

    Use it for texts of authors who must not see the environment variables of this process.
    """
    token = _open.set(False)
    try:
        yield
    finally:
        _open.reset(token)


for _name, _function in RESOLVERS.items():
    OmegaConf.register_resolver(_name, _function, replace=True)
OmegaConf.register_resolver("oc.env", _variable, replace=True)


def references(key: str, value: Any) -> set[str]:
    """Return the dotted keys that the value at `key` refers to."""
    return {_absolute(key, dots, name) for dots, name in REFERENCE.findall(str(value))}


def dependent(keys: Collection[str], references: Mapping[str, Collection[str]]) -> set[str]:
    """Return `keys` and all keys whose values depend on them. references: key -> keys that its value refers to."""
    found, waiting = set(keys), list(keys)
    while waiting:
        of = waiting.pop()
        new = {key for key, names in references.items() if key not in found and any(overlap(of, name) for name in names)}
        found |= new
        waiting += new
    return found


def overlap(one: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one contains the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _absolute(key: str, dots: str, name: str) -> str:
    """Return the absolute key of a reference in the value of `key`.

    dots: empty for an absolute reference; one dot stands for the mapping that contains `key`, two dots for its parent.
    """
    parents = key.split(".")[: -len(dots)] if dots else []
    return ".".join([*parents, name])


def interpolated(value: Any) -> bool:
    """Return whether a value, or an item inside it, contains an interpolation."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, list):
        return any(map(interpolated, value))
    return isinstance(value, dict) and any(map(interpolated, value.values()))


def escaped(value: Any) -> Any:
    """Return a value whose texts are escaped, so that resolving them gives the original texts with their `${`."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return {key: escaped(item) for key, item in value.items()} if isinstance(value, dict) else value


def expand(tree: ConfigMapping) -> bool:
    """Replace references to mappings by copies of the mappings, in place. Return whether there were any references."""
    found = False
    for key, leaf in list(tree.leaves()):
        if isinstance(leaf.value, str) and (match := REFERENCE.fullmatch(leaf.value)):
            target = _absolute(key, *match.groups())
            node = tree.find(target)
            if isinstance(node, ConfigMapping) and not f"{key}.".startswith(f"{target}."):
                tree.set(key, node.copy())
                found = True
    return found


def resolve(tree: ConfigMapping, from_environment: dict[str, Any] | None = None) -> dict[str, Problem]:
    """Replace interpolations by their values, in place. Return dotted key -> problem; values with problems do not change.

    from_environment: a dict to fill with dotted key -> unresolved value, for values that depend on environment variables.
    """
    given = {key: leaf for key, leaf in tree.leaves() if interpolated(leaf.value)}
    values = {}
    for key, leaf in given.items():
        if found := _followed(tree, key):
            values[key] = found.value
        elif template := _template(tree, key, leaf.value):
            with contextlib.suppress(OmegaConfBaseException):  # computed again below, which reports the error
                values[key] = copy.deepcopy(_computed(*template))
    others = {key: leaf for key, leaf in given.items() if key not in values}
    problems = {key: problem for key, leaf in others.items() if (problem := _malformed(key, leaf.value))}
    for key in problems:
        tree.set(key, ConfigValue(MISSING, others[key].origin))
    config = OmegaConf.create(tree.plain() if others else {})
    for key, leaf in others.items():
        if key in problems:
            tree.set(key, leaf)
            continue
        token = _asked.set(names := [])
        try:
            values[key] = _value(config, tree, key)
            if names and from_environment is not None and values[key] is not None:
                from_environment[key] = leaf.value
        except OmegaConfBaseException as error:
            problems[key] = Problem(key, *_explained(leaf.value, error))
        except RecursionError:  # `oc.select` of a mapping that contains it
            problems[key] = Problem(key, *_circular(leaf.value))
        finally:
            _asked.reset(token)
    for key, value in values.items():
        tree.set(key, _node(value, given[key].origin))
    return problems


def _followed(tree: ConfigMapping, key: str) -> ConfigValue | None:
    """Return the value node to which a chain of plain references leads; None if it does not lead to a plain value.

    Most interpolations are plain references, and OmegaConf is slow.
    """
    node, seen = tree.find(key), {key}
    while isinstance(node, ConfigValue) and isinstance(node.value, str) and (match := REFERENCE.fullmatch(node.value)):
        key = _absolute(key, *match.groups())
        if key in seen:
            return None
        seen.add(key)
        node = tree.find(key)
    return node if isinstance(node, ConfigValue) and not interpolated(node.value) and node.value != MISSING else None


def _template(tree: ConfigMapping, key: str, text: Any) -> tuple[str, tuple[tuple[Any, type], ...]] | None:
    """Return (a text with `${_0}`, `${_1}`, ... in place of its references, their (value, type) pairs).

    Return None if the text depends on more than plain references, has an escaped reference, or refers to a value that is no
    scalar.
    """
    if not isinstance(text, str) or "${oc." in text or "\\${" in text or COMPUTED_KEY.search(text):
        return None
    if text.count("${") > MOST_REFERENCES:
        return None
    values = []
    for reference in REFERENCE.findall(text):
        leaf = _followed(tree, _absolute(key, *reference))
        if leaf is None or not isinstance(leaf.value, SCALARS):
            return None
        values.append((leaf.value, type(leaf.value)))  # with types, as 1 and True are equal
    numbers = itertools.count()
    template = REFERENCE.sub(lambda _: f"${{_{next(numbers)}}}", text)
    return template, tuple(values)


@functools.lru_cache(maxsize=4096)
def _computed(template: str, values: tuple[tuple[Any, type], ...]) -> Any:
    """Return the value of a template. Results are cached across keys and recipes: OmegaConf takes milliseconds for each."""
    given = {f"_{number}": value for number, (value, _) in enumerate(values)}
    return OmegaConf.create({**given, "value": template})["value"]


def _value(config: DictConfig, tree: ConfigMapping, dotted: str) -> Any:
    container: Any = config
    *path, last = tree.path(dotted)
    for name in path:
        container = container[name]
    value = container[last]
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _node(value: Any, origin: str | None) -> ConfigNode:
    if isinstance(value, dict):
        return ConfigMapping({str(key): _node(item, origin) for key, item in value.items()}, origin)
    return ConfigValue(value, origin)


def _malformed(key: str, value: Any) -> Problem | None:
    if isinstance(value, str) and REFERENCE.fullmatch(value):
        return None
    if (count := str(value).count("${")) > MOST_REFERENCES:  # many take the parser seconds
        message = f"got {count} interpolations in one value; expected {MOST_REFERENCES} at most"
        return Problem(key, "bad-interpolation", message)
    try:
        OmegaConf.create({"value": value})
    except GrammarParseError as error:
        return Problem(key, "bad-interpolation", f"got '{value}'; expected a valid interpolation: {_first_line(error)}")
    return None


def _explained(value: Any, error: OmegaConfBaseException) -> tuple[str, str]:
    """Return (code, message) of the problem that OmegaConf's error describes. value: the value with the interpolation."""
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"Interpolation key '([^']*)'", str(error))
        return (
            "unknown-reference",
            f"got '{value}', which refers to {missing.group(1) if missing else 'a key'}; there is no such key",
        )
    if "Recursive interpolation" in str(error):
        return _circular(value)
    if isinstance(error, InterpolationToMissingValueError):
        return "missing-value", f"got '{value}', which refers to a key without a value"
    if isinstance(error, UnsupportedInterpolationType):
        known = ", ".join(sorted(RESOLVERS))
        return "bad-interpolation", f"got '{value}'; expected one of the resolvers {known}, or OmegaConf's own oc.*"
    if "Environment variable" in str(error):
        found = re.search(r"Environment variable '([^']*)'", str(error))
        name = found.group(1) if found else "in it"
        return (
            "missing-value",
            f"got '{value}', but the environment variable {name} is not set. Export it, or give the value",
        )
    return "bad-interpolation", f"got '{value}', which cannot be computed: {_first_line(error)}"


def _circular(value: Any) -> tuple[str, str]:
    return "circular", f"got '{value}', which refers back to itself. Give one of the keys in the circle a value"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
