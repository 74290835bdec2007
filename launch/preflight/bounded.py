"""Call a function in a fork of this process that has limits of CPU time and memory.

A chat template is a program: Jinja's sandbox denies it files and objects, but does not bound its loops and its output. The
source of a module may be long and deeply nested.

Any thread may call `call`. The fork has only the calling thread, and a lock that another thread held stays locked in the fork:
at worst, the function waits until its time is over. The fork closes all files but stdin, stdout and stderr, so that it keeps no
connection and no file lock.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

SECONDS = 5.0
"""Limit of CPU time, not of wall-clock time: on a busy machine a short function may take long."""
WAIT_S = 30.0
"""Limit of wall-clock time, which a function reaches that waits, such as for a lock."""
MEMORY = 1 << 30  # bytes besides what this process has
REPLY_BYTES = 16 << 20


class Unbounded(Exception):
    """Raised if the function takes too much time or memory, or raises an error itself."""


def call(function: Callable[[], Any]) -> Any:
    """Call a function in a fork with limits, and return its result, which must be JSON-serializable. Raises Unbounded."""
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
        outcome = json.loads(reply)
    except ValueError:
        raise Unbounded(
            f"it took more than {seconds:g} s of CPU time, {WAIT_S:g} s of wall-clock time, or {MEMORY >> 20} MiB of memory"
        ) from None
    if "raised" in outcome:
        raise Unbounded(f"it raised {outcome['raised']}")
    return outcome["value"]


def _child(function: Callable[[], Any], write: int, seconds: float) -> None:
    """Call the function in the fork, write its result as JSON to the descriptor `write`, and exit even after an error.

    seconds: the limit of CPU time.
    """
    gc.disable()  # a finalizer may wait for a thread, which the fork does not have
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(WAIT_S) + 1)  # it ends without its parent too, even where it waits
        os.closerange(3, write)
        os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with os.fdopen(write, "w") as file:
            file.write(_reply(function))
    except BaseException:  # such as MemoryError: the parent sees no reply
        pass
    finally:
        os._exit(0)


def _reply(function: Callable[[], Any]) -> str:
    try:
        return json.dumps({"value": function()})
    except MemoryError:
        return ""
    except Exception as error:
        return json.dumps({"raised": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def _read(read: int, seconds: float) -> bytes:
    pieces, size, end = [], 0, time.monotonic() + seconds
    waiting = select.poll()  # `select` knows no descriptor above 1023
    waiting.register(read, select.POLLIN)
    while (remaining_s := end - time.monotonic()) > 0 and size <= REPLY_BYTES:
        if not waiting.poll(remaining_s * 1000):
            break
        if not (piece := os.read(read, 1 << 16)):
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    return b""
