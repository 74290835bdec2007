"""The account of a translation: what became of each leaf of their recipe, and the recipe in our keys that grows from it.

A leaf is a value that is not a mapping, or an empty mapping; a list is one leaf. Each is met once: by a section that takes it,
or by the first rule (`rules.py`) that fits. What nobody has met is a key that we do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.nemo_rl.features import Feature, lacking


@dataclass
class Ledger:
    theirs: Mapping[str, Any]
    origins: Mapping[str, str]  # of their leaves: "file:line"
    layer: dict[str, Any] = field(default_factory=dict)  # ours
    our_origins: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    met: set[str] = field(default_factory=set)  # their leaves

    # ---- theirs ----

    def get(self, key: str, default: Any = None) -> Any:
        """A value of theirs, leaf or mapping, without meeting it; `default` where there is none."""
        value: Any = self.theirs
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def take(self, key: str, default: Any = None) -> Any:
        """The same, and all leaves at or below the key are met."""
        value = self.get(key, default)
        self.met.update(leaf for leaf, _ in leaves(self.get(key, {}), key))
        return value

    def take_off(self, section: str, *names: str) -> None:
        """A section that is off, whole; of one that is on, only these keys."""
        if self.get(f"{section}.enabled") is True:
            for name in names:
                self.take(f"{section}.{name}")
        else:
            self.take(section)

    def has(self, key: str) -> bool:
        absent = object()
        return self.get(key, absent) is not absent

    def unmet(self) -> Iterator[tuple[str, Any]]:
        """(key, value) of the leaves that nobody has met."""
        return ((key, value) for key, value in leaves(self.theirs) if key not in self.met)

    # ---- ours ----

    def put(self, ours: str, value: Any, theirs: str) -> None:
        """Set a key of ours. theirs: the key that it comes from."""
        section = self.layer
        *parents, last = ours.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        for leaf, _ in leaves(value, ours):
            source = theirs + leaf.removeprefix(ours)
            origin = self.origins.get(source) or self.origins.get(theirs)
            if origin:
                self.our_origins[leaf] = origin if leaf == source else f"{origin} ({source})"

    def copy(self, key: str) -> None:
        """A key that means the same in ours, if they have it."""
        if self.has(key):
            self.put(key, self.take(key), key)

    def move(self, theirs: str, ours: str) -> None:
        """The same, under another name."""
        if self.has(theirs):
            self.put(ours, self.take(theirs), theirs)

    # ---- what is told ----

    def change(self, key: str, text: str) -> None:
        self.changed.append(f"{key}: {text}")

    def ignore(self, key: str, text: str) -> None:
        self.ignored.append(f"{key}: {text}")

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{key}: {text}")

    def lacks(self, key: str, value: object, feature: Feature, instead: str = "") -> None:
        self.problems.append(lacking(key, value, feature, instead))


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf at or below `key`."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, value
