"""Hold the state of a translation: the consumed leaves of a foreign recipe, and the resulting recipe in Hetstep's keys.

A leaf is a value that is not a mapping, or an empty mapping; a list is one leaf. A function, or the first rule (`rules.py`)
that matches, consumes each leaf once. A leaf that nothing consumes is an unknown key.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Problem
from pipeline.recipe.values import leaves

ABSENT = object()
LONGEST = 60  # characters of a value that a problem shows


@dataclass(frozen=True)
class Translation:
    """The result of translating a foreign recipe."""

    layer: dict[str, Any]  # the recipe in Hetstep's keys
    origins: dict[str, str]  # Hetstep's dotted key -> "file:line", or "file:line (the foreign key)" if the keys differ
    changed: list[str]  # notes on keys with another meaning, one line each
    ignored: list[str]  # notes on keys without effect, one line each
    problems: list[Problem]


@dataclass
class Translator:
    """A foreign recipe, the leaves consumed so far, and the recipe in Hetstep's keys."""

    theirs: Mapping[str, Any]
    origins: Mapping[str, str]  # their leaf -> "file:line"
    layer: dict[str, Any] = field(default_factory=dict)  # the recipe in our keys
    our_origins: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)  # their leaves

    # ---- the foreign recipe ----

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the foreign recipe, leaf or mapping, without consuming it; `default` if it is absent."""
        value: Any = self.theirs
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Return whether the foreign recipe has a key, even with the value null."""
        return self.get(key, ABSENT) is not ABSENT

    def on(self, key: str) -> bool:
        """Return whether the value of a key in the foreign recipe is exactly true."""
        return self.get(key) is True

    def consume(self, key: str, default: Any = None) -> Any:
        """Return a value as `get` does, and consume all leaves at or below its key."""
        self.consumed.update(leaf for leaf, _ in leaves(self.get(key, {}), key))
        return self.get(key, default)

    def consume_off(self, *sections: str) -> None:
        """Consume those of the sections whose `enabled` is not true, because their keys have no effect."""
        for section in sections:
            if not self.on(f"{section}.enabled"):
                self.consume(section)

    def unconsumed_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of the leaves that nothing has consumed."""
        return ((key, value) for key, value in self._leaves if key not in self.consumed)

    @functools.cached_property
    def _leaves(self) -> list[tuple[str, Any]]:
        return list(leaves(self.theirs))

    # ---- the recipe in Hetstep's keys ----

    def put(self, ours: str, value: Any, theirs: str = "") -> None:
        """Set Hetstep's key `ours`. theirs: the foreign key from which the value comes, if the names differ."""
        theirs, section = theirs or ours, self.layer
        *parents, last = ours.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        for leaf, _ in leaves(value, ours):
            source = theirs + leaf.removeprefix(ours)
            if origin := self.origins.get(source) or self.origins.get(theirs):
                self.our_origins[leaf] = origin if leaf == source else f"{origin} ({source})"

    def get_layer(self, key: str) -> Any:
        """Return the value at one of Hetstep's keys that is set already; None if it is not."""
        value: Any = self.layer
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def put_defaults(self, defaults: Mapping[str, Any], theirs: str) -> None:
        """Set the keys that the recipe leaves out to the defaults of its project. theirs: the section without these keys."""
        for key, value in defaults.items():
            if not self.has(key):
                self.put(key, value, theirs)

    def copy(self, key: str) -> None:
        """Copy a key with the same meaning, if the recipe has it."""
        if self.has(key):
            self.put(key, self.consume(key))

    # ---- notes and problems ----

    def change(self, key: str, text: str) -> None:
        """Record that a key means something else here than in the recipe's own project."""
        self.changed.append(f"{key}: {text}")

    def ignore(self, key: str, text: str) -> None:
        """Record that a key has no effect here."""
        self.ignored.append(f"{key}: {text}")

    def problem(self, key: str, code: str, message: str) -> None:
        """Add a problem, with the file and line of the key."""
        self.problems.append(Problem(key, code, message, self.origins.get(key, "")))

    def lacks(self, key: str, value: object, feature: str, instead: str = "") -> None:
        """Add a problem for a value that asks for an unsupported feature. instead: the value or setting to try."""
        text = as_yaml(value)
        text = text if len(text) < LONGEST else f"{text[: LONGEST - 3]}..."
        hint = f". Try {instead}" if instead else ""
        self.problem(key, "unsupported", f"got {text}; Hetstep does not support {feature}{hint}")

    def refuse_unknown(self, project: str, known: Iterable[str] = ()) -> None:
        """Add a problem for each leaf that nothing has consumed. known: keys, besides the consumed ones, to suggest."""
        names = sorted({*self.consumed, *known})
        for key, _ in self.unconsumed_leaves():
            near = difflib.get_close_matches(key, names, 1, cutoff=0.8)
            hint = f"; did you mean '{near[0]}'?" if near else ". Try without it"
            self.problem(key, "unknown-key", f"is neither a key of {project} nor of Hetstep{hint}")

    def result(self) -> Translation:
        """Return the translation."""
        return Translation(self.layer, self.our_origins, self.changed, self.ignored, list(dict.fromkeys(self.problems)))


def as_yaml(value: Any) -> str:
    """Return a scalar as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
