"""Print for people: with `rich_console.py` on a terminal, and as plain lines, one for each item, anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from launch.terminal.safe_text import plain
from pipeline.recipe import secrets
from pipeline.recipe.problems import Problem, format_problems


def _rich() -> ModuleType:
    from launch.terminal import rich_console  # rich takes 50 ms, which commands in scripts need not pay

    return rich_console


def print_field(label: str, text: str, line: str, style: str = "") -> None:
    """Print `text` behind a label on a terminal, wrapped with a hanging indent; elsewhere print `line`."""
    if sys.stdout.isatty():
        _rich().print_rows([(label, text)], style)
    else:
        print(line, flush=True)


def print_state(state: str, text: str) -> None:
    """Print `text` behind a state, such as `failed`, in the state's colour on a terminal."""
    if sys.stdout.isatty():
        _rich().print_rows([(state, text)], _rich().STATE_STYLES[state])
    else:
        print(f"{state}: {text}", flush=True)


def print_rows(rows: Iterable[tuple[str, str]], style: str = "", heading: str = "") -> None:
    """Print rows (label, text) on a terminal, below a heading: see `rich_console.print_rows`."""
    _rich().print_rows(rows, style, heading)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal, whose first column is a state: see `rich_console.print_table`."""
    _rich().print_table(header, rows)


def print_problems(problems: Sequence[Problem]) -> None:
    """Print problems to stderr, each with its origin, key, message and [code]."""
    if sys.stderr.isatty():
        _rich().print_problems(problems)
    else:
        print(plain(secrets.redact(f"error: {format_problems(problems)}")), file=sys.stderr)


def print_unmet(heading: str, problems: Sequence[Problem]) -> None:
    """Print problems that do not end a command to stdout, below a heading."""
    if sys.stdout.isatty():
        _rich().print_unmet(heading, problems)
    else:
        print(f"\n{heading}:\n  - " + "\n  - ".join(map(str, problems)))


def print_usage(first: str, keys: dict[str, str], rest: str) -> None:
    """Print a command's description: its first paragraph, its keys with their meanings, the rest."""
    if sys.stdout.isatty():
        _rich().print_usage(first, keys, rest)
        return
    width = max(map(len, keys)) + 2
    lines = [f"    {name:{width}s}{meaning}" for name, meaning in keys.items()]
    print("\n\n".join(filter(None, (first, "\n".join(lines), rest))))
