"""Spans of time as NeMo-RL writes them, days:hours:minutes:seconds."""

from __future__ import annotations


def seconds(text: str) -> int:
    """00:03:45:00 -> 13500. Raises ValueError if that is not what it is."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"'{text}' is not days:hours:minutes:seconds, as in 00:03:45:00")
    days, hours, minutes, rest = map(int, parts)
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
