"""Show what something was made from and what was made from it: `python launch/lineage.py PATH [root=RUNS] [draw=FILE.html]`.

PATH is a run, a checkpoint, an export, an evaluation, or a model or data file that runs used. Files are known by content, also
under another name. `made_from=FILE_OR_FOLDER` lists everything that was made, directly or through others, from a file or a
folder, such as a data set that turned out to be bad.

Exit status: 0; 2 if the command line has an error, or if no run here has to do with the path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch import command_line, console
from launch.ancestry import drawing, graph, search
from launch.ancestry.graph import Lineage, Node
from launch.command_line import Key
from launch.terminal import on_one_line
from launch.units import plural
from pipeline.config import Problem
from pipeline.lineage import HashCache

WIDTH = 2000
"""Columns where no terminal wraps lines."""

if TYPE_CHECKING:
    from rich.tree import Tree


@dataclass(frozen=True)
class LineageRequest:
    """The command line."""

    path: Annotated[Path | None, Key("PATH", "a run, checkpoint, export, evaluation, model or data file", bare=True)] = None
    made_from: Annotated[Path | None, Key("FILE_OR_FOLDER", "list what was made from this")] = None
    root: Annotated[Path, Key("RUNS", "the folder of the runs; default: runs")] = Path("runs")
    draw: Annotated[Path | None, Key("FILE.html", "also draw the lineage of PATH, into a page or an .svg")] = None

    def problems(self) -> Iterator[Problem]:
        """Yield keys that are missing or contradict each other."""
        if (self.path is None) == (self.made_from is None):
            yield Problem("path", "missing-value", "expected a PATH, or made_from=FILE_OR_FOLDER, and not both")
        if self.draw and self.path is None:
            yield Problem("draw", "contradiction", "got made_from=; expected the PATH whose lineage to draw")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, LineageRequest, execute, arguments)


def execute(request: LineageRequest) -> int:
    """Print the tree or the list, and return the exit status. Raises RecipeError."""
    root = request.root.absolute()
    found = graph.read(root)
    cache = HashCache(root / f".hashes-{os.geteuid()}.jsonl" if root.is_dir() else None)
    if request.made_from:
        return _list(found, request.made_from, cache)
    assert request.path is not None, "LineageRequest.problems lets no such request pass"
    begin = search.nodes_at(found, request.path, cache)
    printer = console.rich_console() if sys.stdout.isatty() else console.rich_console(width=WIDTH)
    for node in begin:
        printer.print(tree(found, node), no_wrap=not sys.stdout.isatty())
    if request.draw:
        drawing.write(found, begin, request.draw)
        print(f"written: {request.draw}")
    return 0


def _list(found: Lineage, path: Path, cache: HashCache) -> int:
    begin = search.nodes_at(found, path, cache, "made_from")
    made = list(search.descendants(found, begin))
    for each in made:
        through = f", through {' > '.join(node.label for node in each.through)}" if each.through else ", directly"
        print(on_one_line(f"{each.node.kind:10s}  {each.node.label}  {each.node.path or 'not here'}{through}"))
    kinds = {kind: sum(each.node.kind == kind for each in made) for kind in ("run", "checkpoint", "export", "evaluation")}
    counts = ", ".join(plural(count, kind) for kind, count in kinds.items() if count)
    print(on_one_line(f"made from {path}: {counts or 'nothing'}"))
    if found.unhashed:
        print(f"note: {plural(len(found.unhashed), 'file')} of other sizes, or changed since, have no recorded hash")
    return 0


def tree(found: Lineage, node: Node) -> Tree:
    """Return a node as a tree for rich: what it was made from, and what was made from it."""
    from rich.tree import Tree  # late, because it takes time

    whole = Tree(_line(node))
    for heading, edges in (("made from", found.parents), ("what was made from it", found.children)):
        if edges.get(node.key):
            _grow(whole.add(heading), found, edges, node.key, {node.key})
    return whole


def _grow(branch: Tree, found: Lineage, edges: dict[str, dict[str, str]], key: str, seen: set[str]) -> None:
    """Add the branches of a node. One that was shown before is shown without its own."""
    for other, role in edges.get(key, {}).items():
        node = found.nodes[other]
        again = other in seen and bool(edges.get(other))
        below = branch.add(_line(node, role if role not in ("made by", "exported from", node.kind) else "", again))
        if not again:
            seen.add(other)
            _grow(below, found, edges, other, seen)


def _line(node: Node, role: str = "", again: bool = False) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in node.facts.items() if name != "path")
    where = "" if node.kind == "run" and node.path is None else node.path or ""
    parts = [f"{node.kind} {node.label}", f"as {role}" if role else "", facts, where, "(above)" if again else ""]
    return on_one_line("  ".join(filter(None, parts)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
