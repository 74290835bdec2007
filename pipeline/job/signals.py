"""Receive the signals that ask a run to leave: SIGUSR2 (time is short), and SIGTERM (preempted, cancelled, or a rank is lost).

A signal is only recorded. Rank 0 checks for both at the end of a step, and the watchdog of each rank checks for SIGTERM, after
which it shortens its timeout. Signals are recorded in a pipe that Python's C handler writes to: a Python handler runs only in
the main thread, which may be inside a collective that never returns.

Under Slurm the launcher receives signals for the ranks, because a signal to a step may end the process that mounts its
container's root file system. The launcher appends their names to a file, one a line, which a thread of rank 0 reads once a
second. The file exists before the ranks start and is appended in place: opening it asks an NFS server for changes
(close-to-open consistency, nfs(5)), whereas a new file may stay unseen as long as the client caches its folder.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

HANDLED = (signal.SIGTERM, signal.SIGUSR2)
WATCH_S = 1.0
"""Seconds between two reads of the launcher's file."""

_lock = threading.Lock()
_received: list[str] = []
_pipe: list[int] = []  # the reading end; empty before `install`


def install(rank: int) -> None:
    """Install the handlers. Call it in the main thread, before slow imports. Ranks other than 0 ignore SIGUSR2."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    _pipe[:] = [reader]
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN if rank else _do_nothing)
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)


def watch(path: Path) -> None:
    """Treat signals whose names are in the file, or are appended to it later, as signals to this process."""
    threading.Thread(target=_watch, args=(path,), name="signals", daemon=True).start()


def _watch(path: Path) -> None:
    signal_names, line_count = [number.name for number in HANDLED], 0
    while True:
        try:
            lines = path.read_bytes().decode(errors="replace").split("\n")[:-1]
        except OSError:
            lines = []  # the file system may come back; if it stays away, writers report it
        with _lock:
            _received.extend(line for line in lines[line_count:] if line in signal_names)
        line_count = max(line_count, len(lines))
        time.sleep(WATCH_S)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def _restore_in_child() -> None:
    """Restore the defaults in a forked child: it shares the pipe, and a SIGTERM to the child must not count as the rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _unblock()


def _do_nothing(_number: int, _frame: object) -> None:
    """Do nothing: the pipe has recorded the signal."""


def received_names() -> list[str]:
    """Return the names of the signals received so far, in order, such as `SIGUSR2`. Callable from any thread."""
    with _lock:
        for reader in _pipe:
            try:
                numbers = os.read(reader, 4096)
            except BlockingIOError:
                continue
            _received.extend(signal.Signals(number).name for number in numbers if number in HANDLED)
        return list(dict.fromkeys(_received))


def terminating() -> bool:
    """Return whether SIGTERM was received."""
    return "SIGTERM" in received_names()
