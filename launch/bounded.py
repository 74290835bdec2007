"""Call a function in a fork of this process that ends after a time of CPU and has little memory.

A chat template is a program: Jinja's sandbox keeps it from files and objects, and not from loops and long texts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

SECONDS = 5.0
"""CPU time: on a busy machine a short function may take longer by the clock."""
WAIT_S = 60.0
"""Longest wait by the clock."""
MEMORY = 1 << 30  # bytes besides what this process has
REPLY_BYTES = 16 << 20


class Unbounded(Exception):
    """The function took too long, or too much memory."""


def call(function: Callable[[], Any]) -> Any:
    """Return what a function returns, which JSON must be able to represent. Raises Unbounded, also if the function raises."""
    seconds = SECONDS
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(function, write, seconds)
    os.close(write)
    try:
        reply = _read(read, WAIT_S)
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        return json.loads(reply)
    except ValueError:
        raise Unbounded(f"it took more than {seconds:g} seconds of CPU time or {MEMORY >> 20} MiB") from None


def _child(function: Callable[[], Any], write: int, seconds: float) -> None:
    """Reply and exit, whatever happens."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/statm") as statm:
            held = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        cpu = int(seconds) + 1  # if the function replaces the timer
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(function()))
    except BaseException:  # MemoryError, RecursionError: the parent sees no reply
        pass
    finally:
        os._exit(0)


def _read(read: int, seconds: float) -> bytes:
    pieces, size, end = [], 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and size <= REPLY_BYTES:
        if not select.select([read], [], [], left)[0]:
            break
        if not (piece := os.read(read, 1 << 16)):
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    return b""
