"""Format numbers with units for people."""

from __future__ import annotations

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def is_count(text: str) -> bool:
    """Return whether a text is a whole number of at most 18 digits. `int` raises ValueError above 4300 digits."""
    return text.isdecimal() and len(text) <= 18


def size(nbytes: float) -> str:
    """Format bytes with three digits and a unit, in powers of 1000."""
    factor, unit = next(((factor, unit) for factor, unit in UNITS if nbytes >= factor), UNITS[-1])
    return f"{nbytes / factor:.3g} {unit}" if nbytes / factor < 999.5 else f"{nbytes / factor:.0f} {unit}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `2 ranks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def seconds(duration: float) -> str:
    """Format seconds with three digits, in s, ms or us."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if duration * factor >= 1:
            return f"{duration * factor:.0f} {unit}" if duration * factor >= 100 else f"{duration * factor:.3g} {unit}"
    return f"{duration * 1e6:.3g} us"
