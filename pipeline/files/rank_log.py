"""Set up the log of a rank: one format for every record, no secrets, and no error from a full disk.

A rank's stdout and stderr go to attempts/NAME/rankNNNNN.log on the shared folder. Modules under `pipeline/` log with
`logging.getLogger(__name__)`; a record becomes

    2026-11-23 19:01:02 INFO train[3] resumed from /runs/a/checkpoints/step_000010

with the node's time, the level, the component and the rank. Further lines of a message follow unchanged. Tracebacks of uncaught
errors and the output of libraries keep their own form.

Python raises from `print` when the disk is full or the file system is away. A rank's work is worth more than its log, so
`GuardedStream` drops what it cannot write, counts it, and reports the count as soon as a write succeeds again. It covers
everything that goes through `sys.stdout` and `sys.stderr`, but not what C libraries write by themselves.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from typing import Any, TextIO

from typing_extensions import override

from pipeline.recipe import secrets

PACKAGE = "pipeline"
"""Name of the parent of all loggers that use the handler. Libraries' loggers keep their own handlers."""


def set_up() -> None:
    """Guard stdout and stderr, and format the log records of `pipeline`. Call it before a library keeps a stream reference."""
    sys.stdout, sys.stderr = GuardedStream(sys.stdout), GuardedStream(sys.stderr)
    log_to_stderr()


def log_to_stderr() -> None:
    """Send log records of `pipeline` of level INFO or higher to stderr, each with time, level, component and rank.

    Component and rank come from environment variables that the launcher sets. A process without them shows its process id.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter())
    logger = logging.getLogger(PACKAGE)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a library that configures the root logger would repeat each line


def _formatter() -> logging.Formatter:
    env = os.environ
    has_rank = "HETSTEP_COMPONENT" in env and "HETSTEP_RANK" in env
    source = f"{env['HETSTEP_COMPONENT']}[{env['HETSTEP_RANK']}]" if has_rank else f"pid[{os.getpid()}]"
    return logging.Formatter(f"%(asctime)s %(levelname)s {source.replace('%', '%%')} %(message)s", "%Y-%m-%d %H:%M:%S")


class GuardedStream(io.TextIOBase):
    """A text stream that writes through to another one, redacts secrets and survives failed writes."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._secrets = secrets.in_environment()
        self._lost = 0  # characters
        self._why = ""
        self._lock = threading.RLock()

    @override
    def write(self, text: str) -> int:
        with self._lock:
            clean = secrets.redact(text, self._secrets)
            try:
                self._stream.write(self._notice() + clean)
                self._stream.flush()
                self._lost = 0
            except OSError as error:
                self._lost += len(text)
                self._why = str(error)
        return len(text)

    def _notice(self) -> str:
        if not self._lost:
            return ""
        message = f"{self._lost} characters of this log were lost: {self._why}"
        record = logging.makeLogRecord({"levelname": "WARNING", "msg": message})
        return f"\n{_formatter().format(record)}\n"

    @override
    def flush(self) -> None:
        """Do nothing: `write` flushes."""

    @override
    def writable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._stream.fileno()

    @override
    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    @override
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    @override
    def errors(self) -> str | None:
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        """The wrapped stream's binary buffer. Bytes written to it are not redacted."""
        return self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
