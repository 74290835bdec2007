"""Print for people on a terminal, with rich: aligned, wrapped and coloured. `console.py` imports this only for a terminal.

The variable NO_COLOR turns colours and bold off.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.terminal.safe_text import on_one_line, plain
from pipeline.recipe import secrets
from pipeline.recipe.problems import Problem, help_hint

LABEL_WIDTH = 10
MIN_TEXT_WIDTH = 20
"""Minimum width of the texts, in columns, on a very narrow terminal."""
STATE_STYLES = {
    "done": "green",
    "passed": "green",
    "running": "cyan",
    "waiting": "yellow",
    "failed": "bold red",
    "stopped": "red",
    "not judged": "yellow",
}
"""State of a run or outcome of a gate -> its style."""


def rich_console(stderr: bool = False, **options: Any) -> Console:
    """Return rich's console for stdout or stderr. It prints texts as they are, without markup or highlighting."""
    colours = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, color_system=colours, **options)


def print_rows(rows: Iterable[tuple[str, str]], style: str = "", heading: str = "") -> None:
    """Print rows (label, text) with aligned labels, and with texts that are wrapped with a hanging indent.

    A word that is too long for a line, such as a path, stays whole, so that it can be copied; the terminal wraps it.

    style: rich's style of the texts. heading: a line above the rows.
    """
    rows = list(rows)
    console = rich_console(soft_wrap=True)
    label_width = max([LABEL_WIDTH, *(len(label) for label, _ in rows)])
    if heading:
        console.print(Text(plain(heading), style="bold"))
    for label, text in rows:
        parts = [part for line in plain(text).split("\n") for part in _wrap(line, console.width - label_width - 1)]
        for number, part in enumerate(parts):
            shown = plain(label) if number == 0 else ""
            console.print(Text.assemble((f"{shown:{label_width}s} ", "bold"), (part, STATE_STYLES.get(text, style))))


def _wrap(line: str, width: int) -> list[str]:
    parts = textwrap.wrap(line, max(width, MIN_TEXT_WIDTH), break_long_words=False, break_on_hyphens=False)
    return parts or [""]


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is a state. A row is one line, however narrow the terminal is."""
    cells = [[on_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    console = rich_console(soft_wrap=True)

    def align(row: Sequence[str]) -> str:
        return "  ".join(f"{cell:{width}s}" for cell, width in zip(row, widths, strict=True)).rstrip()

    console.print(Text(align(header), style="bold"))
    for row in cells:
        text = Text(align(row))
        text.stylize(STATE_STYLES.get(row[0], ""), 0, len(row[0]))
        console.print(text)


def print_problems(problems: Sequence[Problem]) -> None:
    """Print problems to stderr, each with its origin, key, message and [code]."""
    console = rich_console(stderr=True)
    if len(problems) > 1:
        console.print(Text.assemble(("error", "bold red"), f": {len(problems)} problems"))
    console.print(_problem_grid(problems, ("error:", "bold red") if len(problems) == 1 else ("  •", "")))
    console.print(Text(help_hint(problems), style="dim"), soft_wrap=True)  # so that it can be copied


def print_unmet(heading: str, problems: Sequence[Problem]) -> None:
    """Print problems that do not end a command to stdout, below a heading."""
    console = rich_console()
    console.print(Text(f"\n{heading}:", style="bold"))
    console.print(_problem_grid(problems, ("  •", "")))


def print_usage(first: str, keys: dict[str, str], rest: str) -> None:
    """Print a command's description: its first paragraph, its keys with their meanings, the rest."""
    console, grid = rich_console(), _grid(max(map(len, keys)) + 2)
    for name, meaning in keys.items():
        grid.add_row(Text(name, style="bold"), Text(meaning))
    console.print(Text(f"{first}\n"))
    console.print(Padding(grid, (0, 0, 0, 4)))
    if rest:
        console.print(Text(f"\n{rest}"))


def _grid(width: int) -> Table:
    """Return two columns: labels of `width` characters, and texts that wrap at the terminal's width."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, min_width=width)
    grid.add_column(overflow="fold")
    return grid


def _problem_grid(problems: Sequence[Problem], mark: tuple[str, str]) -> Table:
    grid = _grid(len(mark[0]))
    for problem in problems:
        grid.add_row(Text(*mark), _problem_text(problem))
    return grid


def _problem_text(problem: Problem) -> Text:
    origin, key, message = (plain(secrets.redact(part)) for part in (problem.origin, problem.key, problem.message))
    parts = [(f"{origin}: ", "dim") if origin else "", (key, "bold") if key else "", ": " if key else "", message]
    return Text.assemble(*filter(None, parts), (f" [{problem.code}]", "dim"))
