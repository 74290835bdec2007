"""What a rank prints goes to its log on the shared folder, through this: without secrets, and without ending the rank.

Python raises from `print` when the disk is full or the file system is away. A rank's work is worth more than its log, so what
cannot be written is dropped and counted, and the count is told in the log as soon as that takes a line again. Covers what goes
through `sys.stdout` and `sys.stderr`, tracebacks and warnings among it; not what C libraries print by themselves.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any, TextIO

from pipeline import secrets


def guard() -> None:
    """Put a `Guarded` before this process's stdout and stderr. Before anything keeps them, as logging does."""
    sys.stdout, sys.stderr = Guarded(sys.stdout), Guarded(sys.stderr)


class Guarded(io.TextIOBase):
    """A text stream that writes through to another one. What it does not know itself, that one is asked."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._secrets = secrets.in_environment()
        self._lost = 0  # characters
        self._why = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            clean = secrets.redacted(text, self._secrets)
            notice = f"\nhetstep: {self._lost} characters of this log were lost: {self._why}\n" if self._lost else ""
            try:
                self._stream.write(notice + clean)
                self._stream.flush()
                self._lost = 0
            except OSError as error:
                self._lost += len(text)
                self._why = str(error)
        return len(text)

    def flush(self) -> None:
        """`write` has done it."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    def errors(self) -> str | None:
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
