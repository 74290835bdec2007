"""Writing while training goes on: one piece of work at a time, in a thread.

A rank that fails leaves by `os._exit`, which cuts off work that is under way: it must write where only what is complete counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures


class BackgroundWorker:
    """An error of the work is raised by the next call of any method once it has ended, and by every call after it."""

    def __init__(self) -> None:
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._work: futures.Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin once the work before has ended."""
        self.wait()
        self._work = self._executor.submit(work)

    def done(self) -> bool:
        """Whether nothing is under way."""
        if self._work is None or not self._work.done():
            return self._work is None
        self.wait()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way, for at most `timeout_s` seconds; return whether nothing is."""
        if self._work is None:
            return True
        if futures.wait([self._work], timeout_s).done:
            self._work.result()
            return True
        return False
