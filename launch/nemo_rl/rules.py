"""The kinds of rule that the tables of the sections are written in, and how a table is applied.

A pattern is a dotted key in which `*` stands for anything, dots included; `section.*` is also `section` itself where that is
no mapping, or an empty one. The first rule that fits a leaf meets it.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger


@dataclass(frozen=True)
class Same:
    """Means the same in ours."""

    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Ignored:
    """Means nothing here. Told once for all leaves of the rule but nulls; not at all without `why`: nobody would miss them."""

    patterns: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Only:
    """May have these values, which say what we do anyway; another asks for a feature that we do not have."""

    patterns: tuple[str, ...]
    values: tuple[Any, ...]
    feature: Feature
    instead: str = ""


@dataclass(frozen=True)
class Changed:
    """At one of these values it means nothing here; at others it is done otherwise, and that is told."""

    patterns: tuple[str, ...]
    values: tuple[Any, ...]
    how: str


@dataclass(frozen=True)
class Switch:
    """A section with `enabled`. While that is false, or the section null, the section says nothing; true asks for a feature."""

    section: str
    feature: Feature
    instead: str = ""


Rule = Same | Ignored | Only | Changed | Switch


def same(*patterns: str) -> Same:
    return Same(patterns)


def ignored(*patterns: str, why: str = "") -> Ignored:
    return Ignored(patterns, why)


def fits(pattern: str, key: str) -> bool:
    if "*" not in pattern:
        return key == pattern
    return f"{key}.*" == pattern or _compiled(pattern)(key) is not None


@functools.cache
def _compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """fnmatch's own cache holds fewer patterns than these tables have."""
    return re.compile(fnmatch.translate(pattern)).match


def patterns_of(rule: Rule) -> tuple[str, ...]:
    return (f"{rule.section}.*",) if isinstance(rule, Switch) else rule.patterns


def under(section: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules for keys below a section."""

    def moved(rule: Rule) -> Rule:
        if isinstance(rule, Switch):
            return Switch(f"{section}.{rule.section}", rule.feature, rule.instead)
        fields = {**vars(rule), "patterns": tuple(f"{section}.{pattern}" for pattern in rule.patterns)}
        return type(rule)(**fields)

    return tuple(map(moved, rules))


def apply(ledger: Ledger, rules: Iterable[Rule]) -> None:
    """Meet every leaf that a rule fits and that nobody has met. What is told of several leaves is told once, in their order."""
    rules = tuple(rules)
    first = _first(tuple(map(patterns_of, rules)))
    found: dict[int, list[tuple[str, Any]]] = {}
    for key, value in list(ledger.unmet()):
        if (number := first(key)) is not None:
            found.setdefault(number, []).append((key, value))
            ledger.met.add(key)
    for number, those in sorted(found.items()):
        _tell(ledger, rules[number], those)


@functools.cache
def _first(patterns: tuple[tuple[str, ...], ...]) -> Callable[[str], int | None]:
    """Return a function from a key to the index of the first patterns that it fits. It keeps what it found."""

    @functools.lru_cache(maxsize=4096)
    def first(key: str) -> int | None:
        return next((number for number, those in enumerate(patterns) if any(fits(pattern, key) for pattern in those)), None)

    return first


def _tell(ledger: Ledger, rule: Rule, found: list[tuple[str, Any]]) -> None:
    match rule:
        case Same():
            for key, value in found:
                ledger.put(key, value, key)
        case Ignored(patterns, why):
            named = dict.fromkeys(_named(patterns, key) for key, value in found if value is not None)
            if why and named:
                ledger.ignore(", ".join(named), why)
        case Only(_, values, feature, instead):
            for key, value in found:
                if value not in values:
                    ledger.lacks(key, value, feature, instead)
        case Changed(_, values, how):
            if other := [(key, value) for key, value in found if value not in values]:
                ledger.change(", ".join(f"{key}={_shown(value)}" for key, value in other), how)
        case Switch(section, feature, instead):
            if ledger.get(f"{section}.enabled") is True:
                ledger.lacks(f"{section}.enabled", True, feature, instead)


def _named(patterns: tuple[str, ...], key: str) -> str:
    """The pattern that a leaf fits: it stands for all of them."""
    return next(pattern for pattern in patterns if fits(pattern, key))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
