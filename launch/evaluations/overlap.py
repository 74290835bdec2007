"""Find questions whose text occurs in other texts, by overlap of n-grams.

As in GPT-3's paper (arXiv:2005.14165, appendix C) a question overlaps if it shares an n-gram of 13 words with a text, after
both are in lower case and without punctuation. A question of fewer words, or of a script without spaces, is compared by
characters: by 50 of them in a row, or by its whole text if that is shorter. One of fewer than 15 characters cannot be checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

WORDS = 13
"""Words of an n-gram, as in GPT-3's paper."""
CHARACTERS = 50
SHORTEST = 15
"""Characters of the shortest text that is compared."""
COMMON = 10
"""An n-gram of more questions than this is part of a template, and does not count."""
WORD = re.compile(r"[^\W_]+")


@dataclass
class OverlapSearch:
    """The n-grams of questions. `check` texts one after another; `found` has the first overlap of each question."""

    words: int
    by_words: dict[str, list[str]] = field(default_factory=dict)  # n-gram -> ids of questions
    by_start: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)  # first characters -> (n-gram, ids)
    found: dict[str, tuple[str, str]] = field(default_factory=dict)  # question -> (where, n-gram)
    unchecked: set[str] = field(default_factory=set)  # questions that are too short

    @classmethod
    def of(cls, questions: Mapping[str, str], words: int = WORDS) -> OverlapSearch:
        """Return a search for questions, texts by id."""
        search = cls(words)
        grams = {id: set(_grams(text, words)) for id, text in questions.items()}
        counts = Counter(gram for of in grams.values() for gram in of)
        for id, of in grams.items():
            kept = [gram for gram in of if counts[gram] <= COMMON]
            if not kept:
                search.unchecked.add(id)
            for gram in kept:
                search._add(gram, id)
        return search

    def _add(self, gram: tuple[str, bool], id: str) -> None:
        text, of_words = gram
        if of_words:
            self.by_words.setdefault(text, []).append(id)
            return
        begun = self.by_start.setdefault(text[:SHORTEST], [])
        ids = next((ids for other, ids in begun if other == text), None)
        if ids is None:
            begun.append((text, [id]))
        else:
            ids.append(id)

    def check(self, text: str, where: str) -> None:
        """Note the questions that overlap with a text. where: its name, for people."""
        words = _words(text)
        if self.by_words:
            for gram in _word_grams(words, self.words):
                if ids := self.by_words.get(gram):
                    self._note(ids, where, gram)
        if self.by_start:
            joined = "".join(words)
            for begin in range(len(joined) - SHORTEST + 1):
                for gram, ids in self.by_start.get(joined[begin : begin + SHORTEST], ()):
                    if joined.startswith(gram, begin):
                        self._note(ids, where, gram)

    def _note(self, ids: Iterable[str], where: str, gram: str) -> None:
        for id in ids:
            self.found.setdefault(id, (where, gram))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _grams(text: str, count: int) -> Iterator[tuple[str, bool]]:
    """Yield the n-grams of a question, each with whether it is of words."""
    words = _words(text)
    if len(words) >= count:
        yield from ((gram, True) for gram in _word_grams(words, count))
        return
    joined = "".join(words)
    if len(joined) >= SHORTEST:
        size = min(CHARACTERS, len(joined))
        yield from ((joined[begin : begin + size], False) for begin in range(len(joined) - size + 1))


def _word_grams(words: list[str], count: int) -> Iterator[str]:
    """Yield the n-grams of `count` words, joined by spaces."""
    joined, begins = " ".join(words), [0]
    for word in words:
        begins.append(begins[-1] + len(word) + 1)
    for first in range(len(words) - count + 1):
        yield joined[begins[first] : begins[first + count] - 1]
