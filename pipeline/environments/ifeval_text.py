"""Count the sentences and the words in capitals of an English text, and detect a text's language.

lm-evaluation-harness counts both with NLTK and its model `punkt_tab`, 13 MB of data that few machines have. This file follows
the same rules, with a list of abbreviations instead of the model. The counts may differ after an abbreviation or an initial,
where the model knows more words: it decides whether a capitalized word begins a sentence ("the firm Foo Inc. Sales rose").
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

ABBREVIATIONS = {
    "a.m", "adm", "ala", "ariz", "aug", "ave", "bros", "calif", "co", "col", "colo", "conn", "corp", "ct", "d.c", "dec",
    "dr", "feb", "fla", "fri", "ft", "ga", "gen", "ill", "inc", "jan", "jr", "kan", "ky", "l.a", "lt", "ltd", "m.b.a",
    "maj", "messrs", "mg", "mich", "minn", "mr", "mrs", "ms", "n.c", "n.j", "n.y", "nev", "nov", "oct", "ok", "okla", "ore",
    "p.m", "pa", "ph.d", "prof", "rep", "reps", "s.c", "sen", "sep", "sept", "sr", "st", "tenn", "tues", "u.k", "u.n",
    "u.s", "u.s.a", "u.s.s.r", "va", "vs", "vt", "wash", "wed", "wis", "yr",
}  # fmt: skip
"""Words, without their last period, after which a sentence continues unless a word of STARTERS follows."""
STARTERS = {
    "a", "about", "according", "after", "all", "although", "an", "and", "are", "as", "at", "because", "before", "both",
    "but", "by", "can", "do", "during", "each", "even", "every", "for", "from", "he", "her", "here", "his", "how",
    "however", "i", "if", "in", "indeed", "instead", "is", "it", "its", "let", "many", "meanwhile", "moreover", "most",
    "my", "no", "nor", "not", "now", "of", "on", "once", "one", "or", "our", "please", "she", "since", "so", "some",
    "still", "such", "that", "the", "their", "then", "there", "these", "they", "this", "those", "though", "thus", "to",
    "under", "until", "was", "we", "what", "when", "where", "which", "while", "who", "why", "with", "would", "yes", "yet",
    "you", "your",
}  # fmt: skip
"""Words that are rarely capitalized within a sentence."""
INITIALS = set("cdefghklmnprstvw")
"""Letters after which a sentence continues."""
END = re.compile(r"(?<![.?!])[.?!]++[\"')\]}]*+(?=\s|$|[*\[({@:;])")
NEXT_WORD = re.compile(r"\s*(\S{1,16})")  # the beginning of a word; no word of STARTERS is longer
LONGEST_WORD = 64  # characters of the word before a mark that are read
CAPITALS_APART = re.compile(r"[«»\u2018-\u201e`\"\[\](){}<>;@#$%&?!*\u2012-\u2015\s]|--|\.{2,}|[:,](?!\d)")
CLITIC = re.compile(r"(.*[^'])('s|'m|'d|'ll|'re|'ve|n't)", re.IGNORECASE)
TWO_WORDS = {"CANNOT", "D'YE", "GIMME", "GONNA", "GOTTA", "LEMME", "MORE'N", "WANNA", "'TIS", "'TWAS"}


def count_sentences(text: str) -> int:
    """Return the number of sentences. A line break does not end a sentence."""
    count, begin = 0, 0
    text = text.strip()
    for end in END.finditer(text):
        if _ends_sentence(_last_word(text, begin, end.start()), end[0], NEXT_WORD.match(text, end.end())):
            count, begin = count + 1, end.end()
    return count + bool(text[begin:].strip())


def _last_word(text: str, begin: int, end: int) -> str:
    """Return the last characters of the last word of text[begin:end], or "" if that part of the text ends in a space."""
    before = text[max(begin, end - LONGEST_WORD) : end].removesuffix("\n")
    return "" if before[-1:].isspace() else (before.split() or [""])[-1]


def _ends_sentence(last_word: str, mark: str, next_word: re.Match[str] | None) -> bool:
    """Return whether `mark` ends a sentence. last_word: the word before it. next_word: the word after it; None: end of text."""
    if next_word is None:
        return True
    if "?" in mark or "!" in mark:
        return True
    word = next_word[1]
    if mark.count(".") > 1:
        return word[0].isupper()
    last_word = last_word.lstrip("\"'([{*-").lower()
    if last_word in INITIALS:
        return False
    if last_word in ABBREVIATIONS or last_word.rpartition("-")[2] in ABBREVIATIONS or re.fullmatch(r"[a-z]", last_word):
        return word[0].isupper() and re.split(r"\W", word.lower())[0] in STARTERS
    if re.fullmatch(r"[\d.,]*\d", last_word):
        return not word[0].islower()
    return True


def count_capital_words(text: str) -> int:
    """Return the number of words without a small letter. As in NLTK, punctuation splits words, and "CAN'T" counts as two."""
    count = 0
    for word in CAPITALS_APART.split(text):
        stem = word.rstrip(".")
        clitic = CLITIC.fullmatch(stem)
        parts = clitic.groups() if clitic else (stem, stem) if stem in TWO_WORDS else (stem,)
        count += sum(part.isupper() for part in parts)
    return count


class TextAnalysis:
    """Counts sentences and detects languages, with the same result for the same text.

    sentences: "rules" for `count_sentences`, "punkt" for NLTK. Raises ValueError if a package or NLTK's data are missing.
    """

    def __init__(self, sentences: str = "rules") -> None:
        self.count_sentences: Callable[[str], int] = count_sentences if sentences == "rules" else _punkt()
        try:
            detector_factory = importlib.import_module("langdetect.detector_factory")
            self._detection_error: type[Exception] = importlib.import_module("langdetect").LangDetectException
        except ImportError as error:
            raise ValueError(
                f"langdetect is missing where this rank runs ({error}). Try pip install langdetect==1.0.9 in its image"
            ) from None
        self._factory: Any = detector_factory.DetectorFactory()
        self._factory.seed = 0  # otherwise its result differs from call to call
        self._factory.load_profile(detector_factory.PROFILES_DIRECTORY)
        self.detect = functools.lru_cache(maxsize=64)(self._detect)

    def _detect(self, text: str) -> str | None:
        """Return the code of a text's language, such as en or zh-cn; None if the text has no letters of a known language."""
        detector = self._factory.create()
        detector.append(text)
        try:
            return detector.detect()
        except self._detection_error:
            return None


def _punkt() -> Callable[[str], int]:
    try:
        tokenizer = importlib.import_module("nltk.tokenize").PunktTokenizer("english")
    except ImportError:
        raise ValueError(
            "sentences: punkt needs the package nltk where this rank runs. Try pip install nltk in its image"
        ) from None
    except LookupError:
        raise ValueError("sentences: punkt needs NLTK's data. Try python -m nltk.downloader punkt_tab") from None
    return lambda text: len(tokenizer.tokenize(text))
