"""The 25 kinds of instructions of IFEval, each a function of the response and the instruction's arguments.

Texts are compared as the benchmark does, with the readings of its published checks: keywords are regular expressions without
regard to case; "less than" is strict, every other relation is "at least"; a bullet may be "*" or "-".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.environments.ifeval_text import TextAnalysis, count_capital_words

RELATIONS = ("less than", "at least")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

Rule = Callable[..., bool]
"""(response, analysis, **arguments) -> whether the response follows the instruction."""
RULES: dict[str, Rule] = {}
"""Rules by the id of their instruction."""


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the rule of an instruction."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


# ---- keywords ----------------------------------------------------------------------------------------------------------------


@rule("keywords:existence")
def _existence(text: str, _: TextAnalysis, keywords: list[str]) -> bool:
    return all(_matches(keyword, text) for keyword in keywords)


@rule("keywords:forbidden_words")
def _forbidden(text: str, _: TextAnalysis, forbidden_words: list[str]) -> bool:
    return not any(_matches(word, text, whole=True) for word in forbidden_words)


@rule("keywords:frequency")
def _frequency(text: str, _: TextAnalysis, keyword: str, frequency: int, relation: str) -> bool:
    return _compares(_matches(keyword.strip(), text), relation, frequency)


@rule("keywords:letter_frequency")
def _letters(text: str, _: TextAnalysis, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compares(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


# ---- language and case -------------------------------------------------------------------------------------------------------


@rule("language:response_language")
def _language(text: str, analysis: TextAnalysis, language: str) -> bool:
    return analysis.detect(text) in (language, None)


@rule("change_case:english_capital")
def _capitals(text: str, analysis: TextAnalysis) -> bool:
    return text.isupper() and analysis.detect(text) in ("en", None)


@rule("change_case:english_lowercase")
def _lowercase(text: str, analysis: TextAnalysis) -> bool:
    return text.islower() and analysis.detect(text) in ("en", None)


@rule("change_case:capital_word_frequency")
def _capital_words(text: str, _: TextAnalysis, capital_frequency: int, capital_relation: str) -> bool:
    return _compares(count_capital_words(text), capital_relation, capital_frequency)


# ---- length ------------------------------------------------------------------------------------------------------------------


@rule("length_constraints:number_sentences")
def _sentence_count(text: str, analysis: TextAnalysis, num_sentences: int, relation: str) -> bool:
    return _compares(analysis.count_sentences(text), relation, num_sentences)


@rule("length_constraints:number_words")
def _words(text: str, _: TextAnalysis, num_words: int, relation: str) -> bool:
    return _compares(len(re.findall(r"\w+", text)), relation, num_words)


@rule("length_constraints:number_paragraphs")
def _paragraphs(text: str, _: TextAnalysis, num_paragraphs: int) -> bool:
    """Paragraphs are divided by "***"; the first and the last may be empty, and do not count then."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    return len([part for part in parts if part]) == num_paragraphs


@rule("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, _: TextAnalysis, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by two line breaks. Empty ones do not count, but have a place."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 0 < nth_paragraph <= count or not (words := parts[nth_paragraph - 1].split()):
        return False
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return count == num_paragraphs and first.lower() == first_word.lower()


# ---- content and format ------------------------------------------------------------------------------------------------------


@rule("detectable_content:number_placeholders")
def _placeholders(text: str, _: TextAnalysis, num_placeholders: int) -> bool:
    return sum(map(_placeholders_of, text.split("\n"))) >= num_placeholders


def _placeholders_of(line: str) -> int:
    """Return the number of texts in square brackets. A regular expression would search the rest of the line for each [."""
    count, place = 0, 0
    while (begin := line.find("[", place)) >= 0 and (end := line.find("]", begin)) >= 0:
        count, place = count + 1, end + 1
    return count


@rule("detectable_content:postscript")
def _postscript(text: str, _: TextAnalysis, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, marker.lower()), text.lower()) is not None


@rule("detectable_format:number_bullet_lists")
def _bullets(text: str, _: TextAnalysis, num_bullets: int) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


@rule("detectable_format:constrained_response")
def _constrained(text: str, _: TextAnalysis) -> bool:
    return any(answer in text for answer in ANSWERS)


@rule("detectable_format:number_highlighted_sections")
def _highlights(text: str, _: TextAnalysis, num_highlights: int) -> bool:
    """Sections are *highlighted*; in **two** stars a section counts once more."""
    single = [found for found in re.findall(r"\*[^\n\*]*\*", text) if found.strip("*").strip()]
    double = [found for found in re.findall(r"\*\*[^\n\*]*\*\*", text) if found[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


@rule("detectable_format:multiple_sections")
def _sections(text: str, _: TextAnalysis, section_spliter: str, num_sections: int) -> bool:
    return _matches(rf"\s?{section_spliter.strip()}\s?\d+\s?", text, flags=0) >= num_sections


@rule("detectable_format:json_format")
def _json(text: str, _: TextAnalysis) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@rule("detectable_format:title")
def _title(text: str, _: TextAnalysis) -> bool:
    lines = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))  # as <<[^\n]+>>, in one pass
    return any(line[begin : end + 2].lstrip("<").rstrip(">").strip() for line, begin, end in lines if 0 <= begin < end - 2)


@rule("combination:two_responses")
def _two_responses(text: str, _: TextAnalysis) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return all(parts[1:-1]) and len(given) == 2 and given[0] != given[1]


@rule("combination:repeat_prompt")
def _repeat(text: str, _: TextAnalysis, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@rule("startend:end_checker")
def _end(text: str, _: TextAnalysis, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@rule("startend:quotation")
def _quotation(text: str, _: TextAnalysis) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@rule("punctuation:no_comma")
def _no_comma(text: str, _: TextAnalysis) -> bool:
    return "," not in text


# ---- parts -------------------------------------------------------------------------------------------------------------------


def _compares(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == RELATIONS[0] else count >= threshold


def _matches(pattern: str, text: str, whole: bool = False, flags: int = re.IGNORECASE) -> int:
    """Return how often a pattern occurs. One that is no regular expression, such as "C++", counts as text."""
    try:
        re.compile(pattern)
    except re.error:
        pattern = re.escape(pattern)
    return len(re.findall(rf"\b{pattern}\b" if whole else pattern, text, flags))


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Raise ValueError for an unknown instruction, or for arguments that it does not take or lacks."""
    if name not in RULES:
        raise ValueError(f"got instruction {name!r}; expected one of {', '.join(RULES)}")
    taken = set(_parameters(RULES[name]))
    if set(arguments) != taken:
        raise ValueError(f"{name} got {_listed(arguments)}; expected {_listed(taken)}")
    for relation in taken & {"relation", "let_relation", "capital_relation"}:
        if arguments[relation] not in RELATIONS:
            raise ValueError(f"{name} got {relation}={arguments[relation]!r}; expected one of {', '.join(RELATIONS)}")


def _parameters(function: Rule) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[2 : code.co_argcount]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no arguments"
