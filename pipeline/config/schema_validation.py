"""Apply the schema's dataclasses to a tree: fill in defaults, find unknown keys, validate values."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from pipeline.config.config_tree import ConfigMapping, ConfigNode, ConfigValue, from_plain
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING

SIMILAR = 0.75  # least similarity of a misspelled name


# ---- keys of the schema ---------------------------------------------------------------------------------------------------


@cache
def fields(section: type) -> dict[str, Any]:
    """Return the type of each key of a section, without its range."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@cache
def sections(section: type) -> dict[str, tuple[type, bool]]:
    """Return key -> (class of the section, whether the key maps names to such sections), for each key with sections."""
    found = {}
    for name, kind in fields(section).items():
        for one in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
            several = get_origin(one) is dict
            inner = get_args(one)[1] if several else one
            if dataclasses.is_dataclass(inner):
                found[name] = (inner, several)
    return found


@cache
def keys(section: type, prefix: str = "") -> tuple[str, ...]:
    """Return all dotted keys, including sections; `*` stands for a name that the recipe gives."""
    found = []
    for name in fields(section):
        found.append(f"{prefix}{name}")
        if name in sections(section):
            inner, several = sections(section)[name]
            found += keys(inner, f"{prefix}{name}.*." if several else f"{prefix}{name}.")
    return tuple(found)


@cache
def defaults(section: type) -> ConfigMapping:
    """Return the defaults of a section as a tree. Fields without a default have the value MISSING."""
    tree = ConfigMapping()
    for field in dataclasses.fields(section):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        tree.children[field.name] = from_plain(MISSING if value is dataclasses.MISSING else value, None)
    return tree


def with_defaults(section: type, given: ConfigMapping, default: ConfigMapping | None = None) -> ConfigMapping:
    """Return `given` merged over `default` (None: the section's defaults). Unknown keys are kept."""
    tree = (default or defaults(section)).copy()
    tree.origin = given.origin
    for name, node in given.children.items():
        tree.children[name] = _node_with_defaults(*sections(section).get(name, (None, False)), node, tree.children.get(name))
    return tree


def _node_with_defaults(section: type | None, several: bool, given: ConfigNode, default: ConfigNode | None) -> ConfigNode:
    if isinstance(given, ConfigValue):
        return default if given.value == MISSING and default is not None else given
    below = default if isinstance(default, ConfigMapping) else None
    if section and not several:
        return with_defaults(section, given, below)
    children = dict(below.children) if below and not given.replaces else {}
    children |= {name: _node_with_defaults(section, False, node, children.get(name)) for name, node in given.children.items()}
    return ConfigMapping(children, given.origin, given.replaces)


# ---- unknown keys ---------------------------------------------------------------------------------------


class Advice:
    """What is known about unknown keys apart from their spelling. This class knows nothing; a subclass knows a recipe."""

    def accepts(self, key: str) -> bool:
        """Return whether the tree may have a key although it is in no section."""
        return False

    def hint(self, key: str) -> str | None:
        """Return a hint for an unknown key, such as `did you mean 'b.c'?`; None if there is none."""

    def rank(self, near: str) -> Callable[[str], int]:
        """Return a function from one of our keys to its rank as a suggestion in place of `near`, lowest first."""
        return lambda key: 0

    def unread(self, key: str) -> str | None:
        """Return the reason why the recipe does not read one of our keys; None if it does."""


NOTHING_KNOWN = Advice()


def unknown_keys(
    section: type, tree: ConfigMapping, whole: type | None = None, advice: Advice = NOTHING_KNOWN, prefix: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each key of the tree that a section does not have.

    whole: the schema that contains the section at `prefix`; None: the section itself.
    """
    whole = whole or section
    for name, node in tree.children.items():
        key = f"{prefix}{name}"
        if name in fields(section):
            inner, several = sections(section).get(name, (None, False))
            nodes = {key: node}
            if several and isinstance(node, ConfigMapping):
                nodes = {f"{key}.{one}": child for one, child in node.children.items()}
            for where, child in nodes.items():
                if inner and isinstance(child, ConfigMapping):
                    yield from unknown_keys(inner, child, whole, advice, f"{where}.")
            continue
        leaves = [(key, node)] if isinstance(node, ConfigValue) else list(node.leaves(f"{key}."))
        if advice.accepts(key) or (leaves and all(advice.accepts(inner) for inner, _ in leaves)):
            continue
        ours = prefix and any(one.rpartition(".")[2] == name for one in keys(whole))  # a key of another section
        misspelt = isinstance(node, ConfigMapping) and (ours or _siblings(section, name))
        hints = {} if misspelt else {inner: hint for inner, _ in leaves if (hint := advice.hint(inner))}
        for inner, leaf in leaves:
            if inner in hints and next(one for one, hint in hints.items() if hint == hints[inner]) == inner:  # each hint once
                yield Problem(inner, "unknown-key", f"is not a key; {hints[inner]}", leaf.origin or "")
        if len(hints) < len(leaves) or not leaves:
            instead = _instead(whole, section, advice, prefix, name)
            yield Problem(key, "unknown-key", f"is not a key; {instead}", node.origin or "")


def _siblings(section: type, name: str) -> list[str]:
    return difflib.get_close_matches(name.lower(), sorted(fields(section)), 1, SIMILAR)


def _instead(whole: type, section: type, advice: Advice, prefix: str, name: str) -> str:
    """Return a suggestion for an unknown key: a similar key of this section, or an equal or similar key of another section."""
    everything = keys(whole)
    if near := _siblings(section, name):
        return f"did you mean '{prefix}{near[0]}'?"
    if elsewhere := [key for key in everything if key.rpartition(".")[2] == name]:
        return _suggestion(prefix + name, elsewhere, advice)
    ends: dict[str, list[str]] = {}
    for key in everything:
        ends.setdefault(key.rpartition(".")[2], []).append(key)
    if near := difflib.get_close_matches(name.lower(), ends, 1, SIMILAR + 0.1):
        return _suggestion(prefix + name, ends[near[0]], advice)
    return f"there are: {', '.join(sorted(fields(section)))}"


def _suggestion(key: str, candidates: list[str], advice: Advice) -> str:
    nearest = _nearest(key, candidates, advice)
    why = advice.unread(nearest)
    return f"the nearest key is '{nearest}', but {why}; leave it out" if why else f"did you mean '{nearest}'?"


def _nearest(key: str, candidates: list[str], advice: Advice) -> str:
    rank = advice.rank(key)
    return min(candidates, key=lambda one: (rank(one), -difflib.SequenceMatcher(None, key, one).ratio()))


# ---- wrong values -------------------------------------------------------------------------------------------

EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "number": "a number",
    "finite": "a finite number",
    "string": "a string",
    "text": "a string, in quotes if '{word}' is meant",
    "list": "a list",
    "dict": "a mapping of keys",
    "dataclass": "a mapping of keys",
}
"""First word of a pydantic error type -> message of a `wrong-type`; braces hold values from pydantic's context."""
UNEXPECTED = "unexpected_keyword_argument"
"""Type of pydantic's error for an unknown key of a dataclass that forbids them."""
NO_VALUE = "got no value; expected one, since the key has no default"
BOUNDS = {
    "literal_error": ("not-a-choice", "one of: {expected}"),
    "greater_than_equal": ("too-small", "at least {ge}"),
    "greater_than": ("too-small", "above {gt}"),
    "less_than_equal": ("too-large", "at most {le}"),
    "less_than": ("too-large", "below {lt}"),
}


@cache
def adapter(section: type) -> TypeAdapter:
    """Return pydantic's validator of a section. Creating it takes a tenth of a second for a whole recipe."""
    return TypeAdapter(section)


def validate_tree(section: type, tree: ConfigMapping) -> tuple[Any, list[Problem]]:
    """Return (the dataclass of a tree without interpolations, the problems of its values).

    In the dataclass missing values are "". It is None if there are other problems, or if a field without a default in its
    class has no value. Unknown keys are ignored.
    """
    given, missing = tree.copy(), [key for key, leaf in tree.leaves() if leaf.value == MISSING]
    for key in missing:
        given.drop(key)
    found, wrong = validate(section, given.plain())
    problems = {key: Problem(key, "missing-value", NO_VALUE) for key in missing}
    problems |= {problem.key: problem for problem in wrong}
    for key in missing if found else ():
        _blank(found, *tree.path(key))
    origins = {key: node.origin or "" for key in problems if (node := tree.find(key))}
    return found, [dataclasses.replace(problem, origin=origins.get(key, "")) for key, problem in problems.items()]


def validate(section: type, values: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Return (the dataclass of plain values, []), or (None, the first problem of each key). Unknown keys are ignored."""
    try:
        return adapter(section).validate_python(values), []
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for one in error.errors(include_url=False):
            key = _key(one["loc"])
            problems.setdefault(key, _problem(key, one) if one["type"] != UNEXPECTED else _of_item(section, key, one["loc"]))
        return None, list(problems.values())


def _of_item(section: Any, key: str, location: tuple[int | str, ...]) -> Problem:
    """Return the problem of an unknown key in a list's item; `unknown_keys` finds all others."""
    for part in location[:-1]:
        section = fields(section)[str(part)] if dataclasses.is_dataclass(section) else get_args(section)[-1]
    near = _siblings(section, str(location[-1]))
    hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(fields(section))}"
    return Problem(key, "unknown-key", f"is not a key; {hint}")


def _key(location: tuple[int | str, ...]) -> str:
    """Return the key at a location of pydantic. The number of an item is shown if the key goes on inside the item."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in location if part != "[key]"]
    return "".join(parts[:-1] if location and isinstance(location[-1], int) else parts).removeprefix(".")


def _blank(values: Any, name: str, *rest: str) -> None:
    """Set the value at a path of keys to an empty text."""
    if rest:
        _blank(values[name] if isinstance(values, dict) else getattr(values, name), *rest)
    elif isinstance(values, dict):
        values[name] = ""
    else:
        setattr(values, name, "")


def value_problems(value: Any) -> Iterator[Problem]:
    """Yield the problems of a section's single values."""
    yield from validate(type(value), dataclasses.asdict(value))[1]


def validate_mapping(section: type, key: str, given: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """Return (the dataclass of a mapping at `key`, its problems). The dataclass is None if there are problems."""
    tree = from_plain(dict(given), None)
    problems = list(unknown_keys(section, tree, prefix=f"{key}."))
    known = ConfigMapping({name: node for name, node in tree.children.items() if name in fields(section)})
    value, wrong = validate_tree(section, with_defaults(section, known))
    problems += [dataclasses.replace(problem, key=f"{key}.{problem.key}") for problem in wrong]
    return (None if problems else value), problems


def _problem(key: str, error: Mapping[str, Any]) -> Problem:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return Problem(key, "missing-value", NO_VALUE)
    if "message" in context:  # of values.Check
        return Problem(key, kind, context["message"])
    context = {name: str(one).replace(" or ", ", ").replace("'", "") for name, one in context.items()}
    code, expected = BOUNDS.get(kind) or ("wrong-type", EXPECTED[kind.partition("_")[0]])
    expected, got = expected.format(**context), shown(error["input"])
    if isinstance(error["loc"][-1], int):
        expected, got = f"{expected} for each item", f"{got} as an item"
    return Problem(key, code, f"got {got}; expected {expected}")


def _printable(name: str) -> str:
    """Return a key in a form that a terminal can show. Keys in a user's mapping may be any text."""
    return name if name.isprintable() else ascii(name)[1:-1]


def shown(value: Any) -> str:
    """Return a value as a message shows it: as in YAML, a text in quotes, and shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"a mapping of keys ({', '.join(value) or 'empty'})"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
