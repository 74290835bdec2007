"""Record refused requests in the audit log of the root.

One thread writes them, so that no request waits for the log's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.governance import audit_log
from pipeline.config import RecipeError

PERIOD_S = 60.0
MAX_LINES = 60
"""Maximum number of lines in PERIOD_S.

Otherwise anybody who reaches the port could fill the disk.
"""
LONGEST = 200
"""Maximum number of characters of a request that a line quotes."""

logger = logging.getLogger(__name__)


class RefusalLog:
    """Records at most MAX_LINES refusals in PERIOD_S, and counts the others in the next line."""

    def __init__(self, root: Path, max_lines: int = MAX_LINES):
        """Prepare to record. root: the folder of the audit log."""
        self._root, self._max_lines = root, max_lines
        self._lock = threading.Lock()
        self._begun, self._lines, self._left_out = float("-inf"), 0, 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="refusals")
        self._last: Future[None] | None = None

    def record(self, user: str, request: str, why: str) -> None:
        """Queue a refusal for the audit log. Never raises or waits.

        user: "" if the token belongs to no user.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._begun >= PERIOD_S:
                self._begun, self._lines = now, 0
            if self._lines >= self._max_lines:
                self._left_out += 1
                return
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
            details = {"requested_by": user or None, "request": request[:LONGEST], "why": why, "not_recorded_before": left_out}
            self._last = self._writer.submit(self._write, details)

    def wait(self, timeout: float) -> None:
        """Wait until all refusals so far are recorded. Raises TimeoutError."""
        if self._last is not None:
            self._last.result(timeout)

    def _write(self, details: dict[str, Any]) -> None:
        try:
            audit_log.record("refuse", "launch/serve.py", details, self._root)
        except RecipeError as error:
            logger.warning("a refused request is not in the audit log: %s", error)
