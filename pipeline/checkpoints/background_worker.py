"""Run one piece of work at a time in a thread, such as writing a checkpoint while training continues.

A failing rank exits by `os._exit`, which interrupts running work. The work must write so that only complete files count.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures


class BackgroundWorker:
    """A thread that runs one piece of work at a time.

    If the work fails, every later call of a method raises its error.
    """

    def __init__(self) -> None:
        self._executor = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="background")
        self._work: futures.Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the previous work, then start `work`."""
        self.wait()
        self._work = self._executor.submit(work)

    def done(self) -> bool:
        """Return whether no work is running."""
        if self._work is None or not self._work.done():
            return self._work is None
        self.wait()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no work is running, for at most `timeout_s` seconds. Return whether none is."""
        if self._work is None:
            return True
        if futures.wait([self._work], timeout_s).done:
            self._work.result()
            return True
        return False
