"""Draw a live board on a terminal with rich. It is redrawn in place, without scrolling, and fits the terminal's height.

If a frame has more lines than the terminal, the board leaves out, in this order, the least important rows, the last rows of the
table down to KEPT_RANKS, the older warnings, and the rest of the table. Its last line names the parts that are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.terminal.rich_console import STATE_STYLES, rich_console
from launch.terminal.safe_text import on_one_line, plain

LEAST_IMPORTANT = (
    "logs", "runs", "job", "start-up", "idle", "evaluation", "starts", "phases", "checkpoint", "answers", "changes",
)  # fmt: skip
"""Labels of rows, in the order in which they are left out on a low terminal. Rows with other labels always stay."""
LONG = "warnings"
"""Label of the rows of which a low terminal shows only the latest."""
KEPT_RANKS = 4
"""Number of the table's lines that stay until the warnings are cut down to KEPT_WARNINGS."""
KEPT_WARNINGS = 2

Row = tuple[str, str]


class Board:
    """A context manager that draws a board, with the functions `print_rows` and `print_table` of `console`.

    These functions set the rows and the table of the next frame, which `draw` shows.
    """

    def __init__(self, console: Console | None = None):
        """console: rich's console; None: one for stdout."""
        self._console = console or rich_console()
        self._heading, self._style = "", ""
        self._rows: list[Row] = []
        self._header: Sequence[str] = ()
        self._table: list[list[str]] = []
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def print_rows(self, rows: Iterable[Row], style: str = "", heading: str = "") -> None:
        """Set the frame's rows (label, text). A row whose label is empty or indented belongs to the row above."""
        self._rows, self._style, self._heading = list(rows), style, heading

    def print_table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Set the frame's table. A row's first cell has the style of the row's state."""
        self._header, self._table = header, [[on_one_line(cell) for cell in row] for row in rows]

    def draw(self, footer: str = "", whole: bool = False) -> None:
        """Show the frame in place of the previous one. whole: whether to show all of it, however high it is, as at the end."""
        for rows, table, missing in self._cuts():
            frame = self._frame(rows, table, "; ".join(filter(None, [footer, missing])))
            lines = len(self._console.render_lines(frame, self._console.options.update(height=None)))
            if whole or lines <= self._console.height:
                break
        self._rows, self._header, self._table = [], (), []
        self._live.update(frame, refresh=True)

    def _cuts(self) -> Iterator[tuple[list[Row], list[list[str]], str]]:
        """Yield smaller and smaller versions of the frame, as (rows, lines of the table, text about left-out parts)."""
        parts = _parts(self._rows)
        labels = [label for label in LEAST_IMPORTANT if any(_label(part) == label for part in parts)]
        warning_count = next((len(part) for part in parts if _label(part) == LONG), 0)
        few_ranks, few_warnings = min(len(self._table), KEPT_RANKS), min(warning_count, KEPT_WARNINGS)
        for count in range(len(labels) + 1):
            yield self._cut(parts, labels[:count], warning_count, len(self._table))
        for ranks in reversed(range(few_ranks, min(len(self._table), self._console.height))):
            yield self._cut(parts, labels, warning_count, ranks)
        for warnings in reversed(range(few_warnings, warning_count)):
            yield self._cut(parts, labels, warnings, few_ranks)
        for ranks in reversed(range(few_ranks)):
            yield self._cut(parts, labels, few_warnings, ranks)

    def _cut(
        self, parts: Sequence[list[Row]], without: Sequence[str], warnings: int, ranks: int
    ) -> tuple[list[Row], list[list[str]], str]:
        """Return a smaller version of the frame, as `_cuts` yields it.

        without: labels whose rows are left out. warnings, ranks: the numbers of warnings and of the table's lines that stay.
        """
        rows: list[Row] = []
        missing = list(without)
        for part in parts:
            if _label(part) == LONG and warnings < len(part):
                missing.append(f"{len(part) - warnings} of {len(part)} {LONG}")
                rows += [(part[0][0], part[-warnings][1]), *part[len(part) - warnings + 1 :]]
            elif _label(part) not in without:
                rows += part
        if ranks < len(self._table):
            missing.append(f"{len(self._table) - ranks} of {len(self._table)} lines of the table")
        return rows, self._table[:ranks], f"no room for {', '.join(missing)}" if missing else ""

    def _frame(self, rows: Sequence[Row], table: Sequence[Sequence[str]], footer: str) -> Group:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column(overflow="fold")
        for label, text in rows:
            style = STATE_STYLES.get(text.partition(";")[0], self._style)
            grid.add_row(Text(plain(label)), Text(plain(text), style=style))
        heading = [Text(plain(self._heading), style="bold")] if self._heading else []
        tables = [_rich_table(self._header, table)] if table else []
        return Group(*heading, *([grid] if rows else []), *tables, Text(footer, style="dim"))


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in parts. A part is a row with a label and the following rows whose labels are empty or indented."""
    parts: list[list[Row]] = []
    for row in rows:
        if parts and (not row[0] or row[0].startswith(" ")):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _label(part: Sequence[Row]) -> str:
    return part[0][0].strip()


def _rich_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in header:
        table.add_column(name, no_wrap=True)
    for first, *others in rows:
        table.add_row(Text(first, style=STATE_STYLES.get(first, "")), *map(Text, others))
    return table
