"""The signals by which a run is told to leave: SIGUSR2 (time is short) and SIGTERM (preempted, cancelled, or a rank is gone).

They only leave a mark. Rank 0 looks for both at the end of a step; the watchdog of any rank looks for SIGTERM, after which its
patience is short. The marks come through a pipe that Python's C handler writes to: a Python handler runs only in the main
thread, which may be inside a collective that never returns.

Under Slurm the launcher takes signals for the ranks, because one that goes to a step may end what its container's root file
system hangs on. It writes their names into a file, a line each, which rank 0 reads once a second in a thread of its own. The
file is there before the ranks are and is appended to in place: opening it asks an NFS server for what has changed since
(close-to-open consistency, nfs(5)), while a new file may stay unseen for as long as the client caches its folder.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

HANDLED = (signal.SIGTERM, signal.SIGUSR2)
WATCH_S = 1.0
"""Between two looks into the launcher's file."""

_lock = threading.Lock()
_received: list[str] = []
_pipe: list[int] = []  # the end that is read


def install(rank: int) -> None:
    """In the main thread, before anything slow is imported. Ranks other than 0 ignore SIGUSR2."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    _pipe[:] = [reader]
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _nothing)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN if rank else _nothing)
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forked)


def watch(path: Path) -> None:
    """Take the signals that `path` names, now and later, for signals to this process."""
    threading.Thread(target=_watch, args=(path,), name="signals", daemon=True).start()


def _watch(path: Path) -> None:
    names, taken = [number.name for number in HANDLED], 0
    while True:
        try:
            lines = path.read_bytes().decode(errors="replace").split("\n")[:-1]
        except OSError:
            lines = []  # a file system that is away may come back; if not, whoever writes there says so
        with _lock:
            _received.extend(line for line in lines[taken:] if line in names)
        taken = max(taken, len(lines))
        time.sleep(WATCH_S)


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def _forked() -> None:
    """What a rank forks shares the pipe; but its end by SIGTERM, most likely from the rank itself, is not the rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _release()


def _nothing(_number: int, _frame: object) -> None:
    """What counts has gone through the pipe."""


def received() -> list[str]:
    """The names of those that have come, or that the launcher has told, in order: `SIGUSR2`, `SIGTERM`. From any thread."""
    with _lock:
        for reader in _pipe:
            try:
                numbers = os.read(reader, 4096)
            except BlockingIOError:
                continue
            _received.extend(signal.Signals(number).name for number in numbers if number in HANDLED)
        return list(dict.fromkeys(_received))


def terminating() -> bool:
    """Whether SIGTERM has come."""
    return "SIGTERM" in received()
