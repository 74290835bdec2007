"""Read the verdicts in the replies of judges: the judges of evaluations, and of `kind: llm_judge`.

A verdict is never guessed: if a reply has none, the judge is asked again. A verdict is the last line of a reply, and nothing
else is on that line: `Verdict: A`, `**Rating: 7**`. A reply has no verdict if several such lines differ, if it was cut, or if
its thinking did not end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

CUT = "length"
"""The finish reason of a reply that was cut at the limit of tokens. Such a reply has no verdict."""
THINKING = ("<think>", "</think>")
MARKDOWN = re.compile(r"[*_#>`]+")
DECORATION = " \t*_`\"'[]()."
PREFERENCES = {"a": "A", "b": "B", "tie": "tie"}
REFUSALS = ("refused", "partly", "answered")
NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\s*/\s*[0-9]+)?")
LOWEST, HIGHEST = 1.0, 10.0
"""The scale of ratings."""

Value = TypeVar("Value")
Read = Callable[[str], Value | None]
"""A function that returns the value of a text, such as the text after the colon; None if it has none."""


def read_verdict(reply: str, word: str, value_of: Read[Value]) -> Value | None:
    """Return the verdict of a complete reply, or None if it has none. word: the verdict line's first word, such as `Rating`."""
    form = re.compile(rf"[*_#>\s]*{word}[\s*_]*:(.*)", re.IGNORECASE)

    def read(line: str) -> Value | None:
        match = form.fullmatch(line)
        return value_of(match[1].strip(DECORATION)) if match else None

    return _read_last_line(reply, read)


def read_score(reply: str, pattern: re.Pattern[str]) -> float | None:
    """Return the score of a complete reply, or None if it has none.

    pattern: matches the last line. The score is the pattern's group, or the whole line if it has no group.
    """

    def read(line: str) -> float | None:
        forms = (line, line.strip(DECORATION), MARKDOWN.sub("", line).strip(" ."))
        match = next(filter(None, map(pattern.fullmatch, forms)), None)
        try:
            return float(match[pattern.groups]) if match else None
        except (TypeError, ValueError):  # the group is not a number, or took no part in the match
            return None

    return _read_last_line(reply, read)


def read_scores(reply: str, names: Sequence[str]) -> dict[str, float] | None:
    """Return name -> number of a complete reply's last lines, `NAME: N`, one for each name in any order.

    Return None if they are not the last lines, or another line has a different number for a name.
    """
    forms = {name: re.compile(rf"[*_#>\s-]*{re.escape(name)}[\s*_]*:(.*)", re.IGNORECASE) for name in names}

    def read(line: str) -> tuple[str, float] | None:
        for name, form in forms.items():
            if (match := form.fullmatch(line)) and (number := NUMBER.fullmatch(match[1].strip(DECORATION))):
                return name, float(number[1])
        return None

    values = [read(line) for line in _lines(reply)]
    last = values[-len(names) :]
    scores = dict(filter(None, last))
    is_complete = len(scores) == len(names) and None not in last
    return scores if is_complete and all(value is None or scores[value[0]] == value[1] for value in values) else None


def _lines(reply: str) -> list[str]:
    """Return the stripped lines of a reply after its thinking, without empty ones; [] if the thinking does not end."""
    text = reply.rpartition(THINKING[1])[2]
    return [] if THINKING[0] in text else [line.strip() for line in text.splitlines() if line.strip()]


def _read_last_line(reply: str, read: Read[Value]) -> Value | None:
    """Return the value of a reply's last line; None if it has none or another line has a different value.

    read: a function that returns the value of a stripped line, or None.
    """
    if not (lines := _lines(reply)):
        return None
    line_values = [read(line) for line in lines]
    distinct_values = {value for value in line_values if value is not None}
    return line_values[-1] if len(distinct_values) == 1 else None


def read_preference(reply: str) -> str | None:
    """Return the preference of a reply: "A", "B", "tie", or None."""
    return read_verdict(reply, "Verdict", lambda text: PREFERENCES.get(text.lower()))


def read_refusal(reply: str) -> str | None:
    """Return the verdict on a refusal in a reply: "refused", "partly" or "answered"; None if it has none."""
    return read_verdict(reply, "Verdict", lambda text: text.lower() if text.lower() in REFUSALS else None)


def read_rating(reply: str) -> float | None:
    """Return the rating of a reply, from LOWEST to HIGHEST; None if it has none. `7/10` is 7."""
    return read_verdict(reply, "Rating", _rating)


def _rating(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,2})?)(?:\s*/\s*10)?", text)
    return float(match[1]) if match and LOWEST <= float(match[1]) <= HIGHEST else None
