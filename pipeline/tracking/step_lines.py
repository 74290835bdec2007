"""Read metrics.jsonl while a run writes it, and again from the start when a resumed run has replaced it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.files import small_files
from pipeline.observe.metrics import StepLine
from pipeline.recipe import user_files

READ_AT_ONCE = 1 << 22
"""Bytes after which one call of `StepLines.lines` stops reading lines."""


class StepLines:
    """Reads the lines of a metrics.jsonl. Unlike `metrics.Reader`, it repeats all lines after the file was replaced."""

    def __init__(self, path: Path):
        self._path = path
        self._file = self._offset = 0  # inode, bytes read

    def lines(self) -> list[dict[str, Any]]:
        """Return the next complete lines after those of the last call, or [] if there are none.

        If there are many, only the first of them are returned. Raises OSError, and RecipeError for a damaged line.
        """
        try:
            file = user_files.open_file(self._path)
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self._file, self._offset = status.st_ino, 0
            begin = file.seek(self._offset)
            lines: list[dict[str, Any]] = []
            for text in small_files.whole_lines(file, self._path):
                lines.append(dict(small_files.parsed(text, StepLine, self._path)))
                self._offset += len(text)
                if self._offset - begin > READ_AT_ONCE:
                    break
        return lines

    def rewind(self) -> None:
        """Start over at the first line."""
        self._offset = 0
