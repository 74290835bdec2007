"""The state of a translation: which leaves of a NeMo-RL recipe are consumed, and the recipe in our keys that grows from it.

A leaf is a value that is not a mapping, or an empty mapping; a list is one leaf. Each is consumed once: by a function, or by
the first rule (`rules.py`) that fits. A leaf that nothing consumes is an unknown key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import Problem

ABSENT = object()
LONGEST = 60  # characters of a value that a problem shows


@dataclass
class Translator:
    """A NeMo-RL recipe, the leaves consumed so far, and the recipe in our keys."""

    theirs: Mapping[str, Any]
    origins: Mapping[str, str]  # of their leaves: "file:line"
    layer: dict[str, Any] = field(default_factory=dict)  # ours
    our_origins: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    consumed: set[str] = field(default_factory=set)  # their leaves

    # ---- theirs ----

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of theirs, leaf or mapping, without consuming it; `default` where there is none."""
        value: Any = self.theirs
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Return whether NeMo-RL's recipe has a key, null included."""
        return self.get(key, ABSENT) is not ABSENT

    def on(self, key: str) -> bool:
        """Return whether a key is exactly true."""
        return self.get(key) is True

    def consume(self, key: str, default: Any = None) -> Any:
        """Return the same as `get`, and consume all leaves at or below the key."""
        self.consumed.update(leaf for leaf, _ in leaves(self.get(key, {}), key))
        return self.get(key, default)

    def consume_off(self, *sections: str) -> None:
        """Consume the sections that are not enabled; their keys have no effect."""
        for section in sections:
            if not self.on(f"{section}.enabled"):
                self.consume(section)

    def unconsumed(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of the leaves that nothing has consumed."""
        return ((key, value) for key, value in leaves(self.theirs) if key not in self.consumed)

    # ---- ours ----

    def put(self, ours: str, value: Any, theirs: str = "") -> None:
        """Set a key of ours. theirs: the key that it comes from, if that has another name."""
        theirs, section = theirs or ours, self.layer
        *parents, last = ours.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        for leaf, _ in leaves(value, ours):
            source = theirs + leaf.removeprefix(ours)
            if origin := self.origins.get(source) or self.origins.get(theirs):
                self.our_origins[leaf] = origin if leaf == source else f"{origin} ({source})"

    def put_defaults(self, defaults: Mapping[str, Any], theirs: str) -> None:
        """Set keys that their recipe leaves out to their defaults. theirs: the section that it leaves them out of."""
        for key, value in defaults.items():
            if not self.has(key):
                self.put(key, value, theirs)

    def copy(self, key: str) -> None:
        """Take over a key, if their recipe has it, that means the same in ours."""
        if self.has(key):
            self.put(key, self.consume(key))

    # ---- notes and problems ----

    def change(self, key: str, text: str) -> None:
        """Record that a key means something else here than in NeMo-RL."""
        self.changed.append(f"{key}: {text}")

    def ignore(self, key: str, text: str) -> None:
        """Record that a key has no effect here."""
        self.ignored.append(f"{key}: {text}")

    def problem(self, key: str, code: str, message: str) -> None:
        """Add a problem, with the file and line of the key."""
        self.problems.append(Problem(key, code, message, self.origins.get(key, "")))

    def lacks(self, key: str, value: object, feature: str, instead: str = "") -> None:
        """Add the problem of a key whose value asks for a feature that we do not have. instead: what to try."""
        text = shown(value)
        text = text if len(text) < LONGEST else f"{text[: LONGEST - 3]}..."
        hint = f". Try {instead}" if instead else ""
        self.problem(key, "unsupported", f"got {text}, which asks for {feature}; that is not supported{hint}")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf at or below `key`."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, f"{key}.{name}" if key else str(name))
    elif key:
        yield key, value


def shown(value: Any) -> str:
    """Return a value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
