"""Define the kinds of rules in the tables of the sections, and apply a table.

A rule's keys are patterns separated by blanks. `*` matches anything, dots included. `section.*` also matches `section` itself
if that is not a mapping, or an empty one. The first rule that matches a leaf consumes it.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from launch.recipes.translation.translator import ABSENT, Translator, as_yaml


@dataclass(frozen=True)
class Rule:
    """A rule for the leaves whose keys match its patterns."""

    keys: str

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the patterns of `keys`."""
        return tuple(self.keys.split())

    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        """Translate the leaves that match. leaves: (key, value) pairs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Same(Rule):
    """Copy keys that have the same meaning here.

    convert: a function that converts the value, or returns ABSENT to leave the key out. ours: our key, if its name differs.
    """

    convert: Callable[[Any], Any] = lambda value: value
    ours: str = ""

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        for key, value in leaves:
            if (converted := self.convert(value)) is not ABSENT:
                t.put(self.ours or key, converted, key)


@dataclass(frozen=True)
class Ignored(Rule):
    """Ignore keys that have no effect here. `why` is reported once per rule, unless all values are null."""

    why: str = ""

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        named = dict.fromkeys(next(p for p in self.patterns if fits(p, key)) for key, value in leaves if value is not None)
        if self.why and named:
            t.ignore(", ".join(named), self.why)


@dataclass(frozen=True)
class Done(Rule):
    """Keys that a function translates before the table is applied."""

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        pass


@dataclass(frozen=True)
class Only(Rule):
    """Accept keys that have one of `values`; any other value is a problem, because it asks for an unsupported feature."""

    values: tuple[Any, ...]
    feature: str
    instead: str = ""

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        for key, value in leaves:
            if value not in self.values:
                t.lacks(key, value, self.feature, self.instead)


@dataclass(frozen=True)
class Changed(Rule):
    """Ignore keys that have one of `values`; report other values in `changed`, with the explanation `how`."""

    values: tuple[Any, ...]
    how: str

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        if values := [f"{key}={as_yaml(value)}" for key, value in leaves if value not in self.values]:
            t.change(", ".join(values), self.how)


@dataclass(frozen=True)
class Switch(Rule):
    """Ignore a section `section.*`, but add a problem if its key `enabled` is true: its feature is not supported."""

    feature: str
    instead: str = ""

    @override
    def translate(self, t: Translator, leaves: list[tuple[str, Any]]) -> None:
        enabled = f"{self.keys.removesuffix('.*')}.enabled"
        if t.on(enabled):
            t.lacks(enabled, True, self.feature, self.instead)


def if_set(value: Any) -> Any:
    """Return the value, or ABSENT for null."""
    return ABSENT if value is None else value


def under(section: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules with the section's name before each of their keys."""
    return tuple(replace(rule, keys=" ".join(f"{section}.{pattern}" for pattern in rule.patterns)) for rule in rules)


def fits(pattern: str, key: str) -> bool:
    """Return whether a dotted key matches a pattern."""
    if "*" not in pattern:
        return key == pattern
    return f"{key}.*" == pattern or _compile(pattern)(key) is not None


@functools.cache
def _compile(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """Return a function that matches keys with a pattern. fnmatch's own cache is too small for the tables' patterns."""
    return re.compile(fnmatch.translate(pattern)).match


def apply(t: Translator, rules: Iterable[Rule]) -> None:
    """Consume every remaining leaf that a rule matches, and translate the leaves rule by rule."""
    rules = tuple(rules)
    first = _first(tuple(rule.keys for rule in rules))
    by_rule: dict[int, list[tuple[str, Any]]] = {}
    for key, value in list(t.unconsumed_leaves()):
        if (number := first(key)) is not None:
            by_rule.setdefault(number, []).append((key, value))
            t.consumed.add(key)
    for number, leaves in sorted(by_rule.items()):
        rules[number].translate(t, leaves)


@functools.cache
def _first(tables: tuple[str, ...]) -> Callable[[str], int | None]:
    """Return a cached function from a key to the index of the first rule that matches it. tables: the keys of each rule."""
    patterns = [keys.split() for keys in tables]

    @functools.lru_cache(maxsize=4096)
    def first(key: str) -> int | None:
        return next((number for number, group in enumerate(patterns) if any(fits(pattern, key) for pattern in group)), None)

    return first
