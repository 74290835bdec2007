"""Return the lineage of models and data, and keep the registry of named versions of models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from launch.governance import graph, lineage_drawing, search, tree
from launch.governance.graph import Lineage, LineageNode
from launch.governance.model_registry import Registry, Stage
from launch.governance.search import Descendant
from launch.terminal.safe_text import on_one_line
from launch.terminal.units import plural
from pipeline.config.cluster import AUDIT_AUTO
from pipeline.lineage.file_hashes import HashCache

RUNS = "runs"
COUNTED = ("run", "checkpoint", "export", "evaluation")


# ---- lineage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineageView:
    """Holds the ancestors and descendants of a path. `str()` is what `python launch/lineage.py PATH` prints."""

    nodes: Sequence[LineageNode]  # what was asked for: several if several have its content
    graph: Lineage = field(repr=False)

    @property
    def ancestors(self) -> list[LineageNode]:
        """Everything that the path was made from, directly or indirectly, the nearest first."""
        return self._beyond(down=False)

    @property
    def descendants(self) -> list[LineageNode]:
        """Everything that was made from the path, directly or indirectly, the nearest first."""
        return self._beyond(down=True)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the lineage into an .svg or .html file, and return its path. Raises RecipeError for another suffix."""
        file = Path(path).absolute()
        lineage_drawing.write(self.graph, list(self.nodes), file)
        return file

    def _beyond(self, down: bool) -> list[LineageNode]:
        return [self.graph.nodes[key] for key in self.graph.beyond([node.key for node in self.nodes], down)]

    def __str__(self) -> str:
        return tree.text(self.graph, self.nodes)


@dataclass(frozen=True)
class MadeFrom:
    """Holds everything that was made from a file or a folder.

    `str()` is what `python launch/lineage.py made_from=PATH` prints.
    """

    path: Path
    descendants: Sequence[Descendant]  # directly or through others, the nearest first
    unhashed: int  # files of runs without a recorded hash that may have the content, too: of other sizes, or changed since

    def __str__(self) -> str:
        lines = []
        for path in self.descendants:
            through = f", through {' > '.join(node.label for node in path.through)}" if path.through else ", directly"
            lines.append(f"{path.node.kind:10s}  {path.node.label}  {path.node.path or 'not here'}{through}")
        kinds = {kind: sum(path.node.kind == kind for path in self.descendants) for kind in COUNTED}
        counts = ", ".join(plural(count, kind) for kind, count in kinds.items() if count)
        lines.append(f"made from {self.path}: {counts or 'nothing'}")
        if self.unhashed:
            lines.append(
                f"note: {plural(self.unhashed, 'file')} without a recorded hash: not compared, because the size differs or the"
                " file has changed"
            )
        return "\n".join(map(on_one_line, lines))


def lineage(path: str | os.PathLike[str], *, root: str | os.PathLike[str] = RUNS) -> LineageView:
    """Return what a path was made from, and what was made from it.

    Args:
        path: a run, a checkpoint, an export, an evaluation, or a model or data file that runs used. Files are known by content.
        root: the folder of the runs.

    Raises:
        RecipeError: if the path does not exist, or if no run below `root` used or made it.
    """
    lineage_graph, cache = _read(root)
    return LineageView(tuple(search.nodes_at(lineage_graph, Path(path).absolute(), cache)), lineage_graph)


def made_from(path: str | os.PathLike[str], *, root: str | os.PathLike[str] = RUNS) -> MadeFrom:
    """Return everything that was made from a file or a folder, such as a data set that turned out to be bad.

    Args:
        path: a path as for `lineage`. A copy or a renamed file counts as the same.
        root: the folder of the runs.

    Raises:
        RecipeError: if the path does not exist, or if no run below `root` used or made it.
    """
    lineage_graph, cache = _read(root)
    begin = search.nodes_at(lineage_graph, Path(path).absolute(), cache, "made_from")
    return MadeFrom(Path(path), tuple(search.descendants(lineage_graph, begin)), len(lineage_graph.unhashed))


def _read(root: str | os.PathLike[str]) -> tuple[Lineage, HashCache]:
    folder = Path(root).absolute()
    return graph.read(folder), HashCache(folder / f".hashes-{os.geteuid()}.jsonl" if folder.is_dir() else None)


# ---- registry -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelVersion:
    """A version of a named model: an export, whose files stay where they are, and its stage."""

    name: str
    version: int  # from 1
    stage: Stage  # candidate, production or retired
    export: str  # the folder
    id: str  # of the export's weights, by content
    run: str  # the name of the run that it is from
    step: int  # of the checkpoint
    scores: Sequence[Mapping[str, Any]]  # suite, task, metric, value, low, high, questions and evaluation of each task
    files: Mapping[str, str]  # SHA-256 by name
    history: Sequence[Mapping[str, Any]]  # time, user and stage of each change


class ModelRegistry:
    """Holds the named versions of models in a folder. Each change adds a line to the audit log."""

    def __init__(self, folder: Path, audit: str = AUDIT_AUTO):
        """Open the registry in a folder. audit: where changes are logged, a value as of the key `cluster.audit`."""
        self.folder = folder
        self._registry = Registry(folder, audit)

    def __repr__(self) -> str:
        return f"ModelRegistry({str(self.folder)!r})"

    def add(self, name: str, export: str | os.PathLike[str], *, root: str | os.PathLike[str] = RUNS) -> ModelVersion:
        """Add an export to a name as its next version, in the stage `candidate`, and return that version.

        Args:
            name: letters, digits, _ and -.
            export: the folder of an export.
            root: the folder of the runs, whose evaluations of the export, or of its checkpoint, give the scores.

        Raises:
            RecipeError: if the export's files were changed, if the name has this export already, or if it cannot be recorded.
        """
        return _version(name, self._registry.add(name, Path(export).absolute(), Path(root).absolute()))

    def promote(self, name: str, version: int, stage: Stage) -> ModelVersion:
        """Put a version into a stage, and return it. A new version in production retires the one that was there.

        Raises RecipeError if there is no such version or stage, if the version is in that stage already, if it is to go into
        production and its files are not as they were exported, or if the change cannot be recorded.
        """
        return _version(name, self._registry.promote(name, version, stage))

    def names(self) -> list[str]:
        """Return the names that have versions, in order."""
        return self._registry.names()

    def versions(self, name: str | None = None) -> list[ModelVersion]:
        """Return the versions of a name, or with None of all names, oldest first. Raises RecipeError for a damaged file."""
        names = self.names() if name is None else [name]
        return [_version(version_name, values) for version_name in names for values in self._registry.versions(version_name)]

    def show(self, name: str, version: int | None = None) -> ModelVersion:
        """Return a version of a name. version: None: the one in production, else the latest. Raises RecipeError without one."""
        return _version(name, self._registry.version(name, version))


def registry(folder: str | os.PathLike[str] = "runs/registry", *, audit: str = AUDIT_AUTO) -> ModelRegistry:
    """Return the registry in a folder, which the first `add` creates.

    Args:
        folder: holds a file for each name.
        audit: the folder of the audit log, `auto` (as for runs) or `none`.
    """
    return ModelRegistry(Path(folder).absolute(), audit)


def _version(name: str, values: Mapping[str, Any]) -> ModelVersion:
    names = {column.name for column in fields(ModelVersion)} - {"name"}
    return ModelVersion(name=name, **{key: values[key] for key in names})
