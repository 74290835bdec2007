"""Show what something was made from and what was made from it: `python launch/lineage.py PATH [root=RUNS] [draw=FILE.html]`.

PATH is a run, a checkpoint, an export, an evaluation, or a model or data file that runs used. Files are recognized by content,
even under another name. `made_from=FILE_OR_FOLDER` lists everything that was made, directly or through others, from a file or a
folder, such as a data set that turned out to be bad.

Exit status: 0; 2 if the command line has an error, or if no run in `root` is related to the path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.api import provenance
from launch.governance import tree
from launch.terminal import command_line
from launch.terminal.command_line import Key
from launch.terminal.rich_console import rich_console
from pipeline.config import Problem


@dataclass(frozen=True)
class LineageRequest:
    """The command line."""

    path: Annotated[Path | None, Key("PATH", "a run, checkpoint, export, evaluation, model or data file", bare=True)] = None
    made_from: Annotated[Path | None, Key("FILE_OR_FOLDER", "list everything that was made from this file or folder")] = None
    root: Annotated[Path, Key("RUNS", "the folder of the runs; default: runs")] = Path("runs")
    draw: Annotated[Path | None, Key("FILE.html", "also draw the lineage of PATH into a .html or .svg file")] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is missing or contradicts another one."""
        if (self.path is None) == (self.made_from is None):
            yield Problem("path", "missing-value", "got both or neither; expected either a PATH or made_from=FILE_OR_FOLDER")
        if self.draw and self.path is None:
            yield Problem("draw", "contradiction", "got draw= without PATH; expected the PATH whose lineage to draw")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, LineageRequest, execute, arguments)


def execute(request: LineageRequest) -> int:
    """Print the tree or the list, and return the exit status. Raises RecipeError."""
    if request.made_from:
        print(provenance.made_from(request.made_from, root=request.root))
        return 0
    assert request.path is not None, "checked by LineageRequest.problems"
    found = provenance.lineage(request.path, root=request.root)
    printer = rich_console() if sys.stdout.isatty() else rich_console(width=tree.WIDTH)
    for node in found.nodes:
        printer.print(tree.tree(found.graph, node), no_wrap=not sys.stdout.isatty())
    if request.draw:
        print(f"written: {found.draw(request.draw)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
