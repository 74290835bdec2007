"""Start ranks as forks of one process that has imported the pipeline: a machine imports torch once, not once per rank.

Only for ranks without GPUs: libraries look for a GPU when they are imported, and CUDA fails in a fork of a process that did so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

PRELOADED = "pipeline.main"
ENVIRONMENTS = "pipeline.rollout.environment_process"


def common(environments: list[dict[str, str]]) -> dict[str, str]:
    """Return the variables that all ranks have alike."""
    first, *others = environments
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def possible(environments: list[dict[str, str]]) -> bool:
    """Return whether ranks with these variables may be forks: no GPUs, and nothing but Hetstep's own variables differs.

    Libraries read variables when they are imported, so a rank with one of its own must import them itself; and Python reads
    PYTHONPATH when it starts.
    """
    differing = {name for environment in environments for name in environment.keys() - common(environments).keys()}
    if any("PYTHONPATH" in environment for environment in environments):
        return False
    has_gpus = any(environment.get("CUDA_VISIBLE_DEVICES") for environment in environments)
    return not has_gpus and all(name.startswith("HETSTEP_") for name in differing)


def imported() -> bool:
    """Import what the ranks share; return whether that is possible. A rank that imports it itself tells why not, in its log."""
    try:
        importlib.import_module(PRELOADED)
    except Exception:
        traceback.print_exc()
        return False
    return True


def start(main: Callable[[], None], environment: dict[str, str], log: BinaryIO, prepare: Callable[[], None]) -> int:
    """Fork a process that calls `prepare()` and then `main()`; return its id. Call `imported()` first.

    It has `environment` besides this process's variables, writes its output to `log`, reads nothing, leads a process group of
    its own, and has Python's own handlers of signals, as if it had been executed. A generate rank forks the process of its
    environments first, while it has one thread.
    """
    before = dict(os.environ)
    os.environ.update(environment)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does the same; whoever is first, the group is there now
            os.setpgid(pid, pid)
        os.environ.clear()
        os.environ.update(before)
        return pid
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)
        if environment.get("HETSTEP_COMPONENT") == "generate":
            importlib.import_module(ENVIRONMENTS).fork_early()
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # `main` leaves by itself
