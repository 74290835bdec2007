"""A BM25 index of a corpus, as files that all processes of a node share: the package bm25s maps them into memory.

    build(Path("wiki-18.jsonl"), Path("/shared/wiki-18"))
    SearchIndex(Path("/shared/wiki-18")).search("Who wrote Emma?", 3)

A line of the corpus is a JSON object with `contents`, a title and below it the text, as in Search-R1's wiki-18; or with `text`,
and a `title` if it has one. The index refers to the corpus, which stays where it is:

    corpus.json    its path and size
    lines.npy      [N] int64, where each passage begins in it
    ...            those of bm25s: scores of words in passages, and the words

BM25 is Lucene's: k1 1.5, b 0.75, words of two letters and more in lower case, without English stop words.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bm25s.tokenization import Tokenizer  # pyright: ignore[reportMissingImports] as above

CORPUS, LINES = "corpus.json", "lines.npy"


class NoIndex(ValueError):
    """Raised for a folder without a complete index."""


def build(corpus: Path, folder: Path) -> int:
    """Write the index of a corpus into a folder, and return the number of passages. Raises ValueError for a bad line."""
    import bm25s  # pyright: ignore[reportMissingImports] optional package

    lines: list[int] = []
    tokenizer: Any = _tokenizer()  # it takes an iterator too
    words = tokenizer.tokenize(_texts(corpus, lines), update_vocab=True, show_progress=False, length=0)
    if not lines:
        raise ValueError(f"got {corpus}, which is empty; expected a JSON object a line")
    retriever = bm25s.BM25()
    retriever.index((words, tokenizer.get_vocab_dict()), show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CORPUS).unlink(missing_ok=True)  # it comes last, and says that the others are complete
    retriever.save(folder, show_progress=False)
    np.save(folder / LINES, np.array(lines, np.int64))
    described = {"path": str(corpus.absolute()), "bytes": corpus.stat().st_size}
    (folder / CORPUS).write_text(json.dumps(described))
    return len(lines)


def corpus_of(folder: Path) -> Path:
    """Return the corpus of an index. Raises NoIndex if the index or its corpus is not as it was built."""
    try:
        described = json.loads((folder / CORPUS).read_text())
        path, size = Path(described["path"]), described["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        advice = f"Try python launch/index_corpus.py corpus=FILE index={folder}"
        raise NoIndex(f"got {folder}; expected the folder of an index. {advice}") from None
    if not path.is_file() or path.stat().st_size != size:
        raise NoIndex(f"got {folder}, whose corpus {path} has changed or is gone; expected a file of {size} bytes")
    return path


class SearchIndex:
    """An index for searches. Thread-safe; forks share its memory."""

    def __init__(self, folder: Path) -> None:
        """Open an index. Raises NoIndex."""
        import bm25s  # pyright: ignore[reportMissingImports] optional package

        corpus = corpus_of(folder)
        self._retriever: Any = bm25s.BM25.load(folder, mmap=True)  # its stubs are not those of what it returns
        self._lines = np.load(folder / LINES, mmap_mode="r")
        self._tokenizer = _tokenizer()
        with open(corpus, "rb") as file:
            self._corpus = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def search(self, query: str, most: int) -> list[tuple[str, str]]:
        """Return (title, text) of the passages that match best, the best first. Each has a word of the query."""
        words = [word for word in self._tokenizer.splitter(query.lower()) if word in self._retriever.vocab_dict]
        if not words:
            return []
        most = min(most, len(self._lines))
        found = self._retriever.retrieve([words], k=most, show_progress=False, backend_selection="numpy")
        return [
            self._passage(int(number)) for number, score in zip(found.documents[0], found.scores[0], strict=True) if score > 0
        ]

    def _passage(self, number: int) -> tuple[str, str]:
        begin = int(self._lines[number])
        end = self._corpus.find(b"\n", begin)
        return _passage(json.loads(self._corpus[begin : end if end >= 0 else None]))


def _tokenizer() -> Tokenizer:
    from bm25s.tokenization import Tokenizer  # pyright: ignore[reportMissingImports] as above

    return Tokenizer(stopwords="en")


def _texts(corpus: Path, lines: list[int]) -> Iterator[str]:
    """Yield the text of each passage, and note where its line begins."""
    with open(corpus, "rb") as file:
        at = 0
        for number, line in enumerate(file, 1):
            try:
                title, text = _passage(json.loads(line))
            except ValueError as error:
                raise ValueError(f"got line {number} of {corpus}: {error}; expected an object with contents, or text") from None
            lines.append(at)
            at += len(line)
            yield f"{title}\n{text}"


def _passage(record: Any) -> tuple[str, str]:
    """Return (title, text) of a line of the corpus. Raises ValueError if it has none."""
    if not isinstance(record, dict):
        raise ValueError(f"got a {type(record).__name__}")
    if isinstance(contents := record.get("contents"), str):
        title, _, text = contents.partition("\n")
        return title.strip('"'), text
    if isinstance(text := record.get("text"), str):
        return str(record.get("title") or ""), text
    raise ValueError(f"it has: {', '.join(record) or 'nothing'}")
