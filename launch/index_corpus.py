r"""Write the index of a corpus, for the tool `search`, with `python launch/index_corpus.py corpus=FILE index=DIR`.

The corpus has one JSON object a line: {"contents": "TITLE\nTEXT"}, as Search-R1's wiki-18, or {"title": ..., "text": ...}. The
index refers to the corpus, so both must be where all nodes see them. It is built in memory. Needs the package bm25s:
pip install '.[bm25s]'.

Exit status: 0; 2 if the corpus cannot be read, or the package is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.terminal import command_line
from launch.terminal.command_line import Key
from launch.terminal.units import plural
from pipeline.config import Problem, RecipeError
from pipeline.environments import search_index


@dataclass(frozen=True)
class IndexRequest:
    """The command line."""

    corpus: Annotated[Path, Key("FILE", "passages, one JSON object a line")]
    index: Annotated[Path, Key("DIR", "the folder to write")]

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key whose value cannot be used."""
        if not self.corpus.is_file():
            yield Problem("corpus", "file-not-found", f"got {self.corpus}, which is no file")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, IndexRequest, execute, arguments)


def execute(request: IndexRequest) -> int:
    """Write the index. Raises RecipeError for a corpus that cannot be read, and without the package."""
    if importlib.util.find_spec("bm25s") is None:
        raise RecipeError(Problem("index", "not-installed", "bm25s is not installed. Try pip install '.[bm25s]'"))
    try:
        count = search_index.build(request.corpus, request.index)
    except ValueError as error:
        raise RecipeError(Problem("corpus", "bad-format", str(error))) from None
    print(f"{request.index}: {plural(count, 'passage')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
