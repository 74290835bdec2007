"""A tree held against the schema's dataclasses: their defaults, the keys that they do not have, values of another type."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from pipeline.config.layers import Branch, Leaf, copied, of

MISSING = "???"
SIMILAR = 0.75  # how alike two names must be for one to be taken for the other, mistyped
STATES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


# ---- what the schema has --------------------------------------------------------------------------------------------------


@cache
def fields(section: type) -> dict[str, Any]:
    """The type of each key of a section."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def nullable(kind: Any) -> tuple[Any, bool]:
    """(the type without None, whether it may be null)."""
    if get_origin(kind) in (Union, types.UnionType) and type(None) in (arguments := get_args(kind)):
        rest = tuple(a for a in arguments if a is not type(None))
        return (rest[0] if len(rest) == 1 else Union[rest]), True  # noqa: UP007 made at run time
    return kind, kind is Any


@cache
def keys(section: type, prefix: str = "") -> tuple[str, ...]:
    """All dotted keys, sections among them; `*` stands for a name that the recipe gives."""
    found = []
    for name, kind in fields(section).items():
        found.append(f"{prefix}{name}")
        kind = nullable(kind)[0]
        if dataclasses.is_dataclass(kind):
            found += keys(kind, f"{prefix}{name}.")
        elif get_origin(kind) is dict and dataclasses.is_dataclass(get_args(kind)[1]):
            found += keys(get_args(kind)[1], f"{prefix}{name}.*.")
    return tuple(found)


@cache
def _defaults(section: type) -> Branch:
    tree = Branch()
    for field in dataclasses.fields(section):
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        tree.children[field.name] = of(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value, None)
    return tree


def filled(section: type, given: Branch, default: Branch | None = None) -> Branch:
    """`given` over the section's defaults, which the one around it may have changed; what the schema does not have is kept."""
    tree = copied(default or _defaults(section))
    tree.origin = given.origin
    for name, node in given.children.items():
        kind = nullable(fields(section).get(name))[0]
        tree.children[name] = _filled(kind, node, tree.children.get(name))
    return tree


def _filled(kind: Any, given: Leaf | Branch, default: Leaf | Branch | None) -> Leaf | Branch:
    if isinstance(given, Leaf):
        if given.value == MISSING and default is not None:
            return default
        return given
    if dataclasses.is_dataclass(kind):
        return filled(kind, given, default if isinstance(default, Branch) else None)
    if get_origin(kind) is dict:
        values = get_args(kind)[1]
        children = dict(default.children) if isinstance(default, Branch) and not given.replaces else {}
        children |= {name: _filled(values, node, children.get(name)) for name, node in given.children.items()}
        return Branch(children, given.origin)
    return copied(given)


def must_be_given(section: type, given: Branch, dotted: str) -> bool:
    """Whether a key that is not given would have no value: one without a default, of a section that is there."""
    node = filled(section, given).find(dotted)
    return isinstance(node, Leaf) and node.value == MISSING


# ---- keys that it does not have --------------------------------------------------------------------------------------------


class Advice(Protocol):
    """What is known of keys beside how they are spelled."""

    def hint(self, key: str) -> str | None:
        """What to do instead of giving a key that is not there, such as `did you mean 'b.c'?`."""

    def rank(self, near: str) -> Callable[[str], int]:
        """The order in which keys are suggested in place of `near`, lowest first."""


class Spelling:
    """Advice where nothing but the spelling is known."""

    def hint(self, key: str) -> None:
        return None

    def rank(self, near: str) -> Callable[[str], int]:
        return lambda key: 0


SPELLING = Spelling()


def unknown(section: type, tree: Branch, whole: type, advice: Advice = SPELLING, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, problem) of what the schema `whole`, in which `section` begins at `prefix`, does not have."""
    for name, node in tree.children.items():
        key = f"{prefix}{name}"
        if name in fields(section):
            if isinstance(node, Branch):
                yield from _unknown_in(nullable(fields(section)[name])[0], node, whole, advice, key)
            continue
        leaves = [(key, node)] if isinstance(node, Leaf) else list(node.leaves(f"{key}."))
        ours = prefix and any(one.rpartition(".")[2] == name for one in keys(whole))  # of another section, with what is in it
        misspelt = isinstance(node, Branch) and (ours or _siblings(section, name))
        hints = {} if misspelt else {inner: hint for inner, _ in leaves if (hint := advice.hint(inner))}
        for inner, leaf in leaves:
            if inner in hints and next(one for one, hint in hints.items() if hint == hints[inner]) == inner:  # each hint once
                yield inner, f"{_where(leaf)}'{inner}' is not a key; {hints[inner]}"
        if len(hints) < len(leaves) or not leaves:
            yield key, f"{_where(node)}'{key}' is not a key; {_instead(whole, section, advice, prefix, name)}"


def _unknown_in(kind: Any, node: Branch, whole: type, advice: Advice, key: str) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(kind):
        yield from unknown(kind, node, whole, advice, f"{key}.")
    elif get_origin(kind) is dict:
        for name, child in node.children.items():
            if isinstance(child, Branch):
                yield from _unknown_in(get_args(kind)[1], child, whole, advice, f"{key}.{name}")


def _where(node: Leaf | Branch) -> str:
    return f"{node.origin}: " if node.origin else ""


def _siblings(section: type, name: str) -> list[str]:
    return difflib.get_close_matches(name.lower(), sorted(fields(section)), 1, SIMILAR)


def _instead(whole: type, section: type, advice: Advice, prefix: str, name: str) -> str:
    """What may have been meant: a sibling that is spelled alike, the same key of another section, or one that is alike."""
    everything = keys(whole)
    if near := _siblings(section, name):
        return f"did you mean '{prefix}{near[0]}'?"
    if elsewhere := [key for key in everything if key.rpartition(".")[2] == name]:
        return f"did you mean '{_nearest(prefix + name, elsewhere, advice)}'?"
    ends: dict[str, list[str]] = {}
    for key in everything:
        ends.setdefault(key.rpartition(".")[2], []).append(key)
    if near := difflib.get_close_matches(name.lower(), ends, 1, SIMILAR + 0.1):
        return f"did you mean '{_nearest(prefix + name, ends[near[0]], advice)}'?"
    return f"there are: {', '.join(sorted(fields(section)))}"


def _nearest(key: str, candidates: list[str], advice: Advice) -> str:
    rank = advice.rank(key)
    return min(candidates, key=lambda one: (rank(one), -difflib.SequenceMatcher(None, key, one).ratio()))


# ---- values of another type ------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What a value should have been."""


def built(section: type, tree: Branch, faults: dict[str, str], prefix: str = "") -> Any:
    """The dataclass that a tree without interpolations describes, keys it does not have left out.

    faults: takes in, by dotted key, what is wrong with a value; then what comes back is of no use.
    """
    values = {}
    for name, kind in fields(section).items():
        key, node = f"{prefix}{name}", tree.children[name]
        values[name] = _value(kind, node, faults, key)
    return section(**values)


def misfits(section: type, tree: Branch, prefix: str = "") -> dict[str, str]:
    """By dotted key what is wrong with values of keys that the section has too; null passes.

    In place, values that stand for one of the right type (a number in quotes, say) become that.
    """
    faults: dict[str, str] = {}
    for name, node in tree.children.items():
        kind = nullable(fields(section).get(name, Any))[0]
        if kind is Any or (isinstance(node, Leaf) and node.value in (None, MISSING)):
            continue
        if dataclasses.is_dataclass(kind) and isinstance(node, Branch):
            faults |= misfits(kind, node, f"{prefix}{name}.")
        elif get_origin(kind) is dict and dataclasses.is_dataclass(get_args(kind)[1]) and isinstance(node, Branch):
            for key, child in node.children.items():
                faults |= misfits(get_args(kind)[1], child, f"{prefix}{name}.{key}.") if isinstance(child, Branch) else {}
        else:
            value = _value(kind, node, faults, f"{prefix}{name}")
            if isinstance(node, Leaf) and f"{prefix}{name}" not in faults:
                node.value = value
    return faults


def _value(kind: Any, node: Leaf | Branch, faults: dict[str, str], key: str) -> Any:
    bare, may_be_null = nullable(kind)
    if isinstance(node, Branch):
        if dataclasses.is_dataclass(bare):
            return built(bare, node, faults, f"{key}.")
        if get_origin(bare) is dict:
            of_values = get_args(bare)[1]
            return {name: _value(of_values, child, faults, f"{key}.{name}") for name, child in node.children.items()}
        if bare is Any:
            return node.plain()
        faults[key] = f"a mapping of keys ({', '.join(node.children) or 'empty'}), but it must be {_named(kind)}"
    elif node.value is None and may_be_null:
        return None
    elif node.value == MISSING:
        faults[key] = MISSING
    elif dataclasses.is_dataclass(bare) or get_origin(bare) is dict:
        faults[key] = f"{_shown(node.value)}, but it must be {_named(kind)}"
    else:
        try:
            return _converted(bare, node.value)
        except Wrong as wrong:
            faults[key] = f"{_shown(node.value)}, but {wrong.args[0] if wrong.args else f'it must be {_named(kind)}'}"
    return None


def _converted(kind: Any, value: Any) -> Any:
    """Raises Wrong."""
    if kind is Any:
        return value
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise Wrong
        return [_item(get_args(kind)[0], item) for item in value]
    if isinstance(value, list | dict) or value is None:
        raise Wrong
    return {bool: _bool, int: _int, float: _float, str: _text}[kind](value)


def _item(kind: Any, value: Any) -> Any:
    bare, may_be_null = nullable(kind)
    return None if value is None and may_be_null else _converted(bare, value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in STATES:  # from an environment variable, or quoted
        return STATES[value.lower()]
    raise Wrong


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise Wrong
    try:
        number = int(value)
    except (ValueError, OverflowError):
        raise Wrong from None
    if isinstance(value, float) and number != value:
        raise Wrong
    return number


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise Wrong
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise Wrong from None
    if not math.isfinite(number):
        raise Wrong("it must be a finite number")
    return number


def _text(value: Any) -> str:
    if isinstance(value, bool):
        raise Wrong(f"it must be a text; in quotes if '{str(value).lower()}' is meant")
    return str(value)


def _named(kind: Any) -> str:
    bare, may_be_null = nullable(kind)
    if get_origin(bare) is list:
        name = f"a list, each item {_named(get_args(bare)[0])}"
    elif dataclasses.is_dataclass(bare) or get_origin(bare) is dict:
        name = "a mapping of keys"
    else:
        name = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(bare, "something else")
    return f"{name} or null" if may_be_null and bare is not Any else name


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
