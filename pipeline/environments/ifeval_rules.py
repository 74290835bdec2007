"""The rules of IFEval's 25 kinds of instructions. Each is a function of the response and the instruction's arguments.

Texts are compared as the benchmark's published checks do: keywords are regular expressions that ignore case; "less than" is
strict, and every other relation means "at least"; a bullet may be "*" or "-".
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
"""A function (response, analysis, **arguments) -> whether the response follows the instruction."""
RULES: dict[str, Rule] = {}
"""Id of an instruction -> its rule."""


def rule(name: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule of the instruction `name`."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


# ---- keywords ----------------------------------------------------------------------------------------------------------------


@rule("keywords:existence")
def _existence(text: str, _: TextAnalysis, keywords: list[str]) -> bool:
    return all(_count_matches(keyword, text) for keyword in keywords)


@rule("keywords:forbidden_words")
def _forbidden(text: str, _: TextAnalysis, forbidden_words: list[str]) -> bool:
    return not any(_count_matches(word, text, whole_words=True) for word in forbidden_words)


@rule("keywords:frequency")
def _frequency(text: str, _: TextAnalysis, keyword: str, frequency: int, relation: str) -> bool:
    return _is_in_relation(_count_matches(keyword.strip(), text), relation, frequency)


@rule("keywords:letter_frequency")
def _letters(text: str, _: TextAnalysis, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _is_in_relation(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


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
    return _is_in_relation(count_capital_words(text), capital_relation, capital_frequency)


# ---- length ------------------------------------------------------------------------------------------------------------------


@rule("length_constraints:number_sentences")
def _sentence_count(text: str, analysis: TextAnalysis, num_sentences: int, relation: str) -> bool:
    return _is_in_relation(analysis.count_sentences(text), relation, num_sentences)


@rule("length_constraints:number_words")
def _words(text: str, _: TextAnalysis, num_words: int, relation: str) -> bool:
    return _is_in_relation(len(re.findall(r"\w+", text)), relation, num_words)


@rule("length_constraints:number_paragraphs")
def _paragraphs(text: str, _: TextAnalysis, num_paragraphs: int) -> bool:
    """Check the number of paragraphs, which "***" separates. An empty first or last paragraph does not count."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    return len([part for part in parts if part]) == num_paragraphs


@rule("length_constraints:nth_paragraph_first_word")
def _first_word(text: str, _: TextAnalysis, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check a paragraph's first word. Two line breaks divide paragraphs. Only `nth_paragraph` counts empty paragraphs."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 0 < nth_paragraph <= count or not (words := parts[nth_paragraph - 1].split()):
        return False
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0]
    return count == num_paragraphs and first.lower() == first_word.lower()


# ---- content and format ------------------------------------------------------------------------------------------------------


@rule("detectable_content:number_placeholders")
def _placeholders(text: str, _: TextAnalysis, num_placeholders: int) -> bool:
    return sum(map(_count_placeholders, text.split("\n"))) >= num_placeholders


def _count_placeholders(line: str) -> int:
    """Return the number of texts in square brackets. A regular expression takes quadratic time for many [ without ]."""
    count, position = 0, 0
    while (begin := line.find("[", position)) >= 0 and (end := line.find("]", begin)) >= 0:
        count, position = count + 1, end + 1
    return count


@rule("detectable_content:postscript")
def _postscript(text: str, _: TextAnalysis, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, marker.lower()), text.lower()) is not None


@rule("detectable_format:number_bullet_lists")
def _bullets(text: str, _: TextAnalysis, num_bullets: int) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


@rule("detectable_format:constrained_response")
def _constrained_response(text: str, _: TextAnalysis) -> bool:
    return any(answer in text for answer in ANSWERS)


@rule("detectable_format:number_highlighted_sections")
def _highlights(text: str, _: TextAnalysis, num_highlights: int) -> bool:
    """Check the number of *highlighted* sections. A section between **two** stars counts twice."""
    single = [section for section in re.findall(r"\*[^\n\*]*\*", text) if section.strip("*").strip()]
    double = [section for section in re.findall(r"\*\*[^\n\*]*\*\*", text) if section[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


@rule("detectable_format:multiple_sections")
def _sections(text: str, _: TextAnalysis, section_spliter: str, num_sections: int) -> bool:
    return _count_matches(rf"\s?{section_spliter.strip()}\s?\d+\s?", text, flags=0) >= num_sections


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
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


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


def _is_in_relation(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == RELATIONS[0] else count >= threshold


def _count_matches(pattern: str, text: str, whole_words: bool = False, flags: int = re.IGNORECASE) -> int:
    """Return how often a pattern occurs. A pattern that is not a regular expression, such as "C++", counts as text."""
    try:
        re.compile(pattern)
    except re.error:
        pattern = re.escape(pattern)
    return len(re.findall(rf"\b{pattern}\b" if whole_words else pattern, text, flags))


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Raise ValueError for an unknown instruction, or for arguments that it does not take or lacks."""
    if name not in RULES:
        raise ValueError(f"got instruction {name!r}; expected one of {', '.join(RULES)}")
    parameters = set(_parameters(RULES[name]))
    if set(arguments) != parameters:
        raise ValueError(f"{name} got {_list_names(arguments)}; expected {_list_names(parameters)}")
    for relation in parameters & {"relation", "let_relation", "capital_relation"}:
        if arguments[relation] not in RELATIONS:
            raise ValueError(f"{name} got {relation}={arguments[relation]!r}; expected one of {', '.join(RELATIONS)}")


def _parameters(function: Rule) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[2 : code.co_argcount]


def _list_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no arguments"
