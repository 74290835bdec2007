"""A live board on a terminal, drawn by rich: it redraws in place, without scrolling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from launch.console import STATE_STYLES, rich_console
from launch.terminal import on_one_line, plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Board:
    """A context manager with the functions of `console` that print rows and tables. Each frame is shown at once by `draw`."""

    def __init__(self, console: Console | None = None):
        """console: rich's; None: of stdout."""
        from rich.live import Live

        self._parts: list[RenderableType] = []
        self._live = Live(console=console or rich_console(), auto_refresh=False, vertical_overflow="ellipsis")

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def print_rows(self, rows: Iterable[tuple[str, str]], style: str = "", heading: str = "") -> None:
        """Add rows of label and text to the frame."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column(overflow="fold")
        for label, text in rows:
            grid.add_row(Text(plain(label)), Text(plain(text), style=STATE_STYLES.get(text.partition(";")[0], style)))
        self._parts += [Text(plain(heading), style="bold"), grid] if heading else [grid]

    def print_table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table to the frame. The style of a row's first cell is that of its state."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
        for name in header:
            table.add_column(name, no_wrap=True)
        for row in rows:
            first, *others = map(on_one_line, row)
            table.add_row(Text(first, style=STATE_STYLES.get(first, "")), *map(Text, others))
        self._parts.append(table)

    def draw(self, footer: str = "") -> None:
        """Show the frame in place of the last one."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [*self._parts, Text(footer, style="dim")]
        self._parts = []
        self._live.update(Group(*parts), refresh=True)
