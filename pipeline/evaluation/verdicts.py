"""Read verdicts in judges' replies. The rule is strict: what it cannot read is asked again, never guessed.

A verdict is the last line of a reply, and nothing else is on that line: `Verdict: A`, `**Rating: 7**`. A reply with several
such lines that differ has none, and so has one that was cut or whose thinking did not end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

THINKING = ("<think>", "</think>")
DECORATION = " \t*_`\"'[]()."
PREFERENCES = {"a": "A", "b": "B", "tie": "tie"}
REFUSALS = ("refused", "partly", "answered")
LOWEST, HIGHEST = 1.0, 10.0
"""The scale of ratings."""

Value = TypeVar("Value")
Read = Callable[[str], Value | None]
"""Returns the value of the text after the colon, or None if it is not one."""


def read_verdict(reply: str, word: str, value_of: Read[Value]) -> Value | None:
    """Return the verdict of a complete reply, or None. word: what begins its line, `Verdict` or `Rating`."""
    text = reply.rpartition(THINKING[1])[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or THINKING[0] in text:
        return None
    form = re.compile(rf"[*_#>\s]*{word}\s*[*_]*\s*:(.*)", re.IGNORECASE)
    found = [match and value_of(match[1].strip(DECORATION)) for match in map(form.fullmatch, lines)]
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
