"""Return the lineage of models and data, and keep the registry of named versions of models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.governance import graph, lineage_drawing, search, tree
from launch.governance.graph import Lineage, LineageNode
from launch.governance.model_registry import ModelRegistry
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
    return graph.read(folder), HashCache.below(folder)


# ---- registry -----------------------------------------------------------------------------------------------------------


def registry(folder: str | os.PathLike[str] = "runs/registry", *, audit: str = AUDIT_AUTO) -> ModelRegistry:
    """Return the registry in a folder, which the first `add` creates.

    Args:
        folder: holds a file for each name.
        audit: the folder of the audit log, `auto` (as for runs) or `none`.
    """
    return ModelRegistry(Path(folder).absolute(), audit)
