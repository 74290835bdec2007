"""Call a function in a fork of this process that has limits of CPU time and memory.

A chat template is a program: Jinja's sandbox denies it files and objects, but does not bound its loops and its output. The
source of a module may be long and deeply nested.

Any thread may call `call`. The fork has only the calling thread, and a lock that another thread held stays locked in the fork:
at worst, the function waits until its time is over. The fork closes all files but stdout, so that it keeps no connection and no
file lock; what a library prints before it aborts, out of memory, is lost.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pipeline.recipe.problems import Problem, RecipeError

SECONDS = 5.0
"""Limit of CPU time, not of wall-clock time: on a busy machine a short function may take long."""
WAIT_S = 30.0
"""Limit of wall-clock time, which a function reaches that waits, such as for a lock."""
MEMORY = 1 << 30  # bytes besides what this process has
REPLY_BYTES = 16 << 20


class Unbounded(Exception):
    """Raised if the function takes too much time or memory, or raises an error itself."""


def call(function: Callable[[], Any]) -> Any:
    """Call a function in a fork with limits, and return its result, which must be JSON-serializable.

    Raises Unbounded, and the function's RecipeError.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    if (child := os.fork()) == 0:  # multiprocessing starts no process in a worker of its pools
        _child(function, sender)
    sender.close()
    try:
        outcome = json.loads(receiver.recv_bytes(REPLY_BYTES)) if receiver.poll(WAIT_S) else {}
    except (EOFError, OSError):  # the fork ended without a reply, or its reply is too large
        outcome = {}
    finally:
        receiver.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # where this process ignores SIGCHLD
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if "problems" in outcome:
        raise RecipeError(*(Problem(*problem) for problem in outcome["problems"]))
    if "raised" in outcome:
        raise Unbounded(f"it raised {outcome['raised']}")
    if "value" not in outcome:
        raise Unbounded(
            f"it took more than {SECONDS:g} s of CPU time, {WAIT_S:g} s of wall-clock time, or {MEMORY >> 20} MiB of memory"
        )
    return outcome["value"]


def _child(function: Callable[[], Any], sender: Connection) -> NoReturn:
    """Call the function in the fork, send its result as JSON, and exit even after an error."""
    gc.disable()  # a finalizer may wait for a thread, which the fork does not have
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(int(WAIT_S) + 1)  # it ends without its parent too, even where it waits
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.closerange(3, sender.fileno())
        os.closerange(sender.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reply = json.dumps({"value": function()})
        except MemoryError:
            raise
        except RecipeError as error:
            reply = json.dumps({"problems": [(problem.key, problem.code, problem.message) for problem in error.problems]})
        except Exception as error:
            reply = json.dumps({"raised": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        sender.send_bytes(reply.encode())
    except BaseException:  # such as MemoryError: the parent sees no reply
        pass
    finally:
        os._exit(0)
