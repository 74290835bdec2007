"""Find questions whose text occurs in other texts, by overlap of n-grams.

As in GPT-3's paper (arXiv:2005.14165, appendix C), a question overlaps with a text if they share an n-gram of 13 words, after
both are changed to lower case without punctuation. A question of fewer words, or in a script without spaces, is compared by
characters: by 50 consecutive ones, or by its whole text if that is shorter. A question of fewer than 15 characters cannot be
checked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

WORDS = 13
"""Number of words of an n-gram, as in GPT-3's paper."""
CHARACTERS = 50
SHORTEST = 15
"""Minimum number of characters of a text that is compared."""
COMMON = 10
"""An n-gram that is in more questions than this is ignored, as a part of a template."""
WORD = re.compile(r"[^\W_]+")


@dataclass
class OverlapSearch:
    """Holds the n-grams of questions, and the overlaps that were found.

    `check` searches one text after another for them; `overlaps` has the first overlap of each question.
    """

    words: int
    by_words: dict[str, list[str]] = field(default_factory=dict)  # n-gram -> ids of questions
    by_start: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)  # first characters -> (n-gram, ids)
    overlaps: dict[str, tuple[str, str]] = field(default_factory=dict)  # question -> (where, n-gram)
    unchecked: set[str] = field(default_factory=set)  # questions that are too short

    @classmethod
    def of(cls, questions: Mapping[str, str], words: int = WORDS) -> OverlapSearch:
        """Return a search for questions. questions: id -> text. words: number of words of an n-gram."""
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
        bucket = self.by_start.setdefault(text[:SHORTEST], [])
        ids = next((ids for known, ids in bucket if known == text), None)
        if ids is None:
            bucket.append((text, [id]))
        else:
            ids.append(id)

    def check(self, text: str, where: str) -> None:
        """Record in `overlaps` which questions overlap with a text. where: a name of the text, for people."""
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
            self.overlaps.setdefault(id, (where, gram))


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _grams(text: str, count: int) -> Iterator[tuple[str, bool]]:
    """Yield (n-gram, whether it consists of words rather than characters) for a question."""
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
