"""Find out from the main thread's stack whether it is blocked in a collective.

If a rank is slow at its own work, its peers wait for it in collectives: they spend a large share of their time there, and the
slow rank a small share. On a GPU a collective runs asynchronously, so the host seems to wait only when it needs the result.
"""

from __future__ import annotations

import sys
import threading

DEPTH = 3
"""Number of innermost frames to look at. A collective such as `dist.all_reduce` may be called by one or two wrappers."""
COLLECTIVE = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
FSDP = "torch/distributed/fsdp/_fully_shard/"


class StackWatch:
    """Counts the seconds in which the main thread is in a collective. The time between calls of `look` is the resolution."""

    def __init__(self, thread: int | None = None):
        """Watch a thread. thread: its identifier; None: the main thread."""
        self._thread = threading.main_thread().ident if thread is None else thread
        self.seconds = 0.0

    def look(self, since_s: float) -> None:
        """Count the seconds since the previous look, if the thread is in a collective now."""
        if self._in_collective():
            self.seconds += since_s

    def _in_collective(self) -> bool:
        frame = sys._current_frames().get(self._thread or 0)
        for _ in range(DEPTH):
            if frame is None:
                return False
            if frame.f_code.co_filename.endswith(COLLECTIVE) or FSDP in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False
