"""Call a function in a fork of this process that has limits of CPU time and memory.

A chat template is a program: Jinja's sandbox denies it files and objects, but does not bound its loops and its output. The
source of a module may be long and deeply nested. A module that is imported may do anything.

Any thread may call `call`. The fork has only the calling thread, and a lock that another thread held stays locked in the fork:
at worst, the function waits until its time is over. The fork closes all files, so that it keeps no connection and no file lock,
and what it prints is discarded. It leads a session, and what it starts in that session ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
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


def call(
    function: Callable[[], Any], seconds: float | None = None, wait_s: float | None = None, memory: int | None = None
) -> Any:
    """Call a function in a fork with limits, and return its result, which must be JSON-serializable. Raises Unbounded.

    seconds, wait_s, memory: limits in place of SECONDS, WAIT_S and MEMORY.
    """
    seconds, wait_s, memory = seconds or SECONDS, wait_s or WAIT_S, memory or MEMORY
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(function, write, seconds, wait_s, memory)
    os.close(write)
    try:
        reply = _read(read, wait_s)
    finally:
        os.close(read)
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        outcome = json.loads(reply)
    except ValueError:
        limits = f"{seconds:g} s of CPU time, {wait_s:g} s of wall-clock time, or {memory >> 20} MiB of memory"
        raise Unbounded(f"it ended with status {status}" if status > 0 else f"it took more than {limits}") from None
    if "raised" in outcome:
        raise Unbounded(f"it raised {outcome['raised']}")
    return outcome["value"]


def _child(function: Callable[[], Any], write: int, seconds: float, wait_s: float, memory: int) -> None:
    """Call the function in the fork, write its result as JSON to the descriptor `write`, and exit even after an error."""
    gc.disable()  # a finalizer may wait for a thread, which the fork does not have
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(wait_s) + 1)  # it ends without its parent too, even where it waits
        os.setsid()
        for standard in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), standard)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os.closerange(3, write)
        os.closerange(write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        with os.fdopen(write, "w") as file:
            file.write(f"{_reply(function)}\n")
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
        piece = os.read(read, 1 << 16)
        pieces.append(piece)
        size += len(piece)
        if not piece or piece.endswith(b"\n"):  # what the function has started may keep the pipe open
            return b"".join(pieces)
    return b""
