"""Tell from its stack whether the main thread is blocked in a collective.

A rank that is slow at its own work makes its peers wait in collectives, so the peers' share of time there is large and its own
is small. On a GPU a collective runs beside the host, and the host is seen to wait only where it waits for the result.
"""

from __future__ import annotations

import sys
import threading

DEPTH = 3
"""Innermost frames to look at: `dist.all_reduce` is called by a wrapper or two, but a model is not called by a collective."""
COLLECTIVE = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
FSDP = "torch/distributed/fsdp/_fully_shard/"


class StackWatch:
    """Counts the seconds in which the main thread is in a collective, to the resolution of its calls of `look`."""

    def __init__(self, thread: int | None = None):
        """thread: its identifier; None: the main thread's."""
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
