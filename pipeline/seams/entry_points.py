"""Find parts of Hetstep in installed packages, by entry points (https://packaging.python.org/specifications/entry-points).

A package names them in its pyproject.toml. Nothing of it is imported until a recipe uses the name:

    [project.entry-points."hetstep.algorithms"]
    focal = "my_package.focal:Focal"
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TypeVar

from pipeline.recipe.problems import Problem, RecipeError

Part = TypeVar("Part")


@dataclass(frozen=True)
class InstalledPart:
    """A part of an installed package."""

    path: str  # dotted
    package: str
    version: str


@cache
def find(group: str) -> Mapping[str, InstalledPart]:
    """Return name -> part, for a group of entry points. Imports nothing. Raises RecipeError if two packages share a name."""
    found: dict[str, InstalledPart] = {}
    for point in sorted(metadata.entry_points(group=group), key=lambda point: point.name):
        distribution = point.dist
        package, version = (distribution.name, distribution.version) if distribution else ("?", "")
        part = InstalledPart(point.value.split("[")[0].strip().replace(":", "."), package, version)
        if (other := found.setdefault(point.name, part)).path != part.path:
            message = f"the packages {other.package} and {part.package} both name {point.name}; expected one. Try to remove one"
            raise RecipeError(Problem(group, "ambiguous", message))
    return found


class Registry(Mapping[str, Part]):
    """Name -> part: ours, and those that installed packages add under a group of entry points.

    `built_in` are ours alone. The packages are searched when a name is not ours, or when all names are listed. Raises
    RecipeError if a package gives a part the name of one of ours.
    """

    def __init__(self, group: str, built_in: Mapping[str, Part], load: Callable[[str], Part]) -> None:
        """Bind to a group. load: returns the part at a dotted path; called when the part is used."""
        self.group, self.built_in, self._load = group, built_in, load

    def _added(self) -> Mapping[str, InstalledPart]:
        refuse_names_of_ours(self.group, self.built_in)
        return find(self.group)

    def __getitem__(self, name: str) -> Part:
        return self.built_in[name] if name in self.built_in else self._load(self._added()[name].path)

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self._added()

    def __len__(self) -> int:
        return len(self.built_in) + len(self._added())

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or ("." not in str(name) and name in self._added())


def refuse_names_of_ours(group: str, ours: Container[str]) -> None:
    """Raise RecipeError if an installed package gives a part the name of one of ours."""
    for name, part in find(group).items():
        if name in ours:
            message = f"the package {part.package} names '{name}', which is one of Hetstep's; expected another name"
            raise RecipeError(Problem(group, "already-exists", f"{message}. Try to remove the package"))


def described(group: str) -> list[str]:
    """Return a line for each part of installed packages."""
    return [f"{name}: {part.path} of {part.package} {part.version}" for name, part in find(group).items()]
