"""A search tool: passages of a corpus that match a query, by BM25 (search_index.py), in this process and without a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import Configurable
from pipeline.environments.python_tool import Folder
from pipeline.environments.search_index import SearchIndex
from pipeline.environments.tool import Tool, ToolError, ToolSession
from pipeline.recipe.values import MISSING, Positive

MAX_CHARACTERS = 1000


@dataclass
class SearchArguments:
    """The kwargs of the tool `search`."""

    index: Folder = MISSING
    """Folder that launch/index_corpus.py wrote, as an absolute path."""
    results: Annotated[Positive, Field(le=100)] = 3
    """Number of passages of a result."""
    passage: Annotated[Positive, Field(le=1 << 20)] = 1200
    """Maximum characters of a passage. The rest of a longer one is cut."""


class SearchTool(Configurable, Tool, ToolSession):
    """Maps `{"query": "Who wrote Emma?"}` to `Doc 1 (Title: Emma) ...`."""

    Arguments = SearchArguments
    package = "bm25s"
    parameters: ClassVar = {"query": str}
    description = "Search a collection of documents for passages."
    descriptions: ClassVar = {"query": "Words of the passages, or a question."}

    def __init__(self, arguments: SearchArguments) -> None:
        """Open the index. Raises NoIndex, a ValueError."""
        self._index, self._arguments = SearchIndex(Path(arguments.index)), arguments

    @override
    def open(self) -> ToolSession:
        return self

    @override
    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        query, most = arguments["query"].strip(), self._arguments.passage
        if not query or len(query) > MAX_CHARACTERS:
            raise ToolError(f"got a query of {len(query)} characters; expected 1 to {MAX_CHARACTERS}")
        found = self._index.search(query, self._arguments.results)
        shown = (f"Doc {place} (Title: {title}) {text[:most]}" for place, (title, text) in enumerate(found, 1))
        return "\n".join(shown) or "nothing was found; try other words"
