r"""Compare an answer to a math problem with the expected answer, by math-verify.

An expected answer is read as LaTeX only, as in NeMo-RL. math-verify could also take the last number of a text that is not
LaTeX, but then 1 would be right for `x**2 + 1`. If an expected answer has no LaTeX expression, only an answer that repeats its
text is right.

Comparing two expressions can take forever or use all memory, since sympy evaluates what a model wrote. So answers are compared
in a process with limits. `python -m pipeline.environments.math_comparison` only reads expected answers, as lines of JSON, and
prints for each whether math-verify reads an expression in it. Of the packages that load slowly it imports math-verify alone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
from dataclasses import dataclass

FORMULA = re.compile(r"(?<![\\\d])(?:\$\$[^$]+\$\$|\$[^$]+\$)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
NUMBER_AND_PERIOD = re.compile(r"\s*(\\?\$?\s*-?[\d,./]*\d)\.\s*")
UPRIGHT = re.compile(r"\\(?:mathrm|mathit|operatorname|textrm|text)\s*\{\s*([ei])\s*\}")
r"""e and i in upright letters. math-verify takes a trailing \mathrm{i} for a unit, so that 1 + 2\mathrm{i} would be 3."""
EXTRACTED_BYTES = 500  # of the answer that math-verify extracts


@dataclass(frozen=True, slots=True)
class MathVerdict:
    """The result of a comparison."""

    right: bool = False
    unparsed: bool = False  # the answer has neither a number nor a formula
    extracted: str = ""  # text of the answer that was compared, without spaces


def load() -> None:
    """Import math-verify and all modules that a comparison imports."""
    for name in ("math_verify", "latex2sympy2_extended"):  # they warn that they run without time limits
        logging.getLogger(name).setLevel(logging.ERROR)
    compare("\\frac{1}{2}", "\\boxed{0.5}")


def compare(expected: str, text: str) -> MathVerdict | None:
    """Return the verdict on an answer, or None if the expected answer cannot be parsed. May take forever or raise any error."""
    from math_verify import verify

    gold = _parse_expected(expected)
    if not gold:
        return None
    if not (parsed := _parse(text)):
        return MathVerdict(unparsed=True)
    right = verify(gold, parsed, timeout_seconds=None) and (_is_expression(gold) or _repeats(text, expected))
    return MathVerdict(bool(right), extracted=_extracted_text(parsed))


def _parse(text: str, only_latex: bool = False) -> list:
    """Return the expressions of a text, followed by the text of the last expression; [] if there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    forms = (LatexExtractionConfig(),) if only_latex else (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(UPRIGHT.sub(_slant, text), forms, parsing_timeout=None)  # pyright: ignore[reportArgumentType] None: no timeout


def _slant(match: re.Match[str]) -> str:
    r"""Return the matched letter, after a space if a command precedes it: \pi\mathrm{i} becomes \pi i."""
    return " " * match.string[max(match.start() - 1, 0) : match.start()].isalpha() + match[1]


def _extracted_text(parsed: list) -> str:
    if not isinstance(parsed[-1], str):
        return ""
    return "".join(parsed[-1].split()).encode(errors="replace")[:EXTRACTED_BYTES].decode(errors="replace")


@functools.lru_cache(maxsize=1024)
def _parse_expected(text: str) -> list:
    r"""Return the expressions of an expected answer, as `_parse` does.

    The answer is a formula, a sentence with a formula, or bare LaTeX (\frac{1}{2}), which is read as if in a box. As in
    NeMo-RL, several formulas are read as one formula: none of them alone is the answer.
    """
    if not text.strip():
        return []
    if number := NUMBER_AND_PERIOD.fullmatch(text):  # LaTeX reads no number in `42.`
        text = number[1]
    candidates = [text, f"\\boxed{{{text}}}"] if _names_its_formula(text) else [f"\\boxed{{{text}}}"]
    readings = [reading for candidate in candidates if (reading := _parse(candidate, only_latex=True))]
    return next(filter(_is_expression, readings), readings[0] if readings else [])


def _names_its_formula(text: str) -> bool:
    """Return whether a text has a box, or a single formula and no other number. The dollar sign of a price is no formula."""
    if "\\boxed" in text:
        return True
    return len(FORMULA.findall(text)) == 1 and not re.search(r"\d", FORMULA.sub("", text))


def _is_expression(parsed: list) -> bool:
    return any(not isinstance(item, str) for item in parsed)


def _repeats(text: str, expected: str) -> bool:
    """Return whether a text's last box, or the whole text if it has no box, repeats the expected answer except for spaces.

    This check is needed because math-verify may compare only the beginnings of texts that it cannot read.
    """
    expected_text, answer_text = (re.sub(r"[\s$]", "", source) for source in (expected, text[max(text.rfind("\\boxed"), 0) :]))
    return expected_text.removeprefix("\\boxed{").removesuffix("}") in answer_text


def main() -> None:
    """Read expected answers from stdin until its end, and print for each whether math-verify reads an expression in it."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    load()
    for line in sys.stdin:
        print(json.dumps(_is_expression(_parse_expected(json.loads(line)))), file=replies, flush=True)


if __name__ == "__main__":
    main()
