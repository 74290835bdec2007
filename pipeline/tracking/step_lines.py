"""Read metrics.jsonl while a run writes it, and from the start when a resumed run has replaced it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

READ_AT_ONCE = 1 << 22
"""Bytes of one read, at most, but for a longer line."""


class StepLines:
    """The lines of a metrics.jsonl. Unlike `pipeline.metrics.Reader` it repeats all lines of a file that was replaced."""

    def __init__(self, path: Path):
        self._path = path
        self._file = self._offset = 0  # inode, bytes read

    def lines(self) -> list[dict[str, Any]]:
        """Return complete lines after those of the last call, some of them if there are many.

        Raises OSError, and ValueError for a line that is not JSON.
        """
        try:
            file = open(self._path, "rb")  # noqa: SIM115 closed below
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self._file, self._offset = status.st_ino, 0
            file.seek(self._offset)
            read = file.readlines(READ_AT_ONCE)
        whole = [text for text in read if text.endswith(b"\n")]
        lines = [json.loads(text) for text in whole]
        self._offset += sum(map(len, whole))
        return lines

    def rewind(self) -> None:
        """Start over at the first line."""
        self._offset = 0
