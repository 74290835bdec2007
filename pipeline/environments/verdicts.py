"""Read verdicts in the replies of judges: those of evaluations, and of `kind: llm_judge`.

The rule is strict: what it cannot read is asked again, never guessed.
A verdict is the last line of a reply, and nothing else is on that line: `Verdict: A`, `**Rating: 7**`. A reply with several
such lines that differ has none, and so has one that was cut or whose thinking did not end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

CUT = "length"
"""The finish reason of a reply that the limit of tokens cut; it has no verdict."""
THINKING = ("<think>", "</think>")
MARKDOWN = re.compile(r"[*_#>`]+")
DECORATION = " \t*_`\"'[]()."
PREFERENCES = {"a": "A", "b": "B", "tie": "tie"}
REFUSALS = ("refused", "partly", "answered")
LOWEST, HIGHEST = 1.0, 10.0
"""The scale of ratings."""

Value = TypeVar("Value")
Read = Callable[[str], Value | None]
"""Returns the value of a text, such as what follows the colon, or None if it is not one."""


def read_verdict(reply: str, word: str, value_of: Read[Value]) -> Value | None:
    """Return the verdict of a complete reply, or None. word: what begins its line, `Verdict` or `Rating`."""
    form = re.compile(rf"[*_#>\s]*{word}[\s*_]*:(.*)", re.IGNORECASE)

    def read(line: str) -> Value | None:
        match = form.fullmatch(line)
        return value_of(match[1].strip(DECORATION)) if match else None

    return _of_last_line(reply, read)


def read_score(reply: str, pattern: re.Pattern[str]) -> float | None:
    """Return the score of a complete reply, or None: the whole last line, or that match's group. pattern: of a number."""

    def read(line: str) -> float | None:
        forms = (line, line.strip(DECORATION), MARKDOWN.sub("", line).strip(" ."))
        match = next(filter(None, map(pattern.fullmatch, forms)), None)
        try:
            return float(match[pattern.groups]) if match else None
        except (TypeError, ValueError):  # the group is no number, or has no part in the match
            return None

    return _of_last_line(reply, read)


def _of_last_line(reply: str, read: Read[Value]) -> Value | None:
    """Return the value of the last line of a reply if no other line has another one. read: the value of a stripped line."""
    text = reply.rpartition(THINKING[1])[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or THINKING[0] in text:
        return None
    found = [read(line) for line in lines]
    values = {value for value in found if value is not None}
    return found[-1] if len(values) == 1 else None


def read_preference(reply: str) -> str | None:
    """Return "A", "B" or "tie"."""
    return read_verdict(reply, "Verdict", lambda text: PREFERENCES.get(text.lower()))


def read_refusal(reply: str) -> str | None:
    """Return "refused", "partly" or "answered"."""
    return read_verdict(reply, "Verdict", lambda text: text.lower() if text.lower() in REFUSALS else None)


def read_rating(reply: str) -> float | None:
    """Return a rating from LOWEST to HIGHEST; `7/10` is 7."""
    return read_verdict(reply, "Rating", _rating)


def _rating(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,2})?)(?:\s*/\s*10)?", text)
    return float(match[1]) if match and LOWEST <= float(match[1]) <= HIGHEST else None
