"""Start ranks as forks of one process that has imported the pipeline, so that a machine imports torch only once.

Only ranks without GPUs are forks: libraries initialize CUDA when they are imported, and CUDA fails in forks after that.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

PRELOADED = "pipeline.main"
ENVIRONMENTS = "pipeline.rollout.judges.parent_process"


def common(environments: list[dict[str, str]]) -> dict[str, str]:
    """Return the variables with equal values on all ranks."""
    first, *others = environments
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def possible(environments: list[dict[str, str]]) -> bool:
    """Return whether ranks with these variables may be forks: no GPUs, no PYTHONPATH, and only HETSTEP_* variables differ.

    Libraries read variables on import, so a rank with other variables of its own must import the libraries itself. Python reads
    PYTHONPATH when it starts.
    """
    differing = {name for environment in environments for name in environment.keys() - common(environments).keys()}
    if any("PYTHONPATH" in environment for environment in environments):
        return False
    has_gpus = any(environment.get("CUDA_VISIBLE_DEVICES") for environment in environments)
    return not has_gpus and all(name.startswith("HETSTEP_") for name in differing)


def import_shared() -> bool:
    """Import the modules that the ranks share, and return whether that succeeded.

    If it fails, each rank imports them itself and logs the error.
    """
    try:
        importlib.import_module(PRELOADED)
    except Exception:
        traceback.print_exc()
        return False
    return True


def start(main: Callable[[], None], environment: dict[str, str], log: BinaryIO, prepare: Callable[[], None]) -> int:
    """Fork a process that calls `prepare()` and then `main()`, and return its id. Call `import_shared()` first.

    The process adds `environment` to this process's variables, writes its output to `log`, has an empty stdin, leads its own
    process group, and has Python's default signal handlers, as after an exec. A generate rank first forks the process of its
    environments, while it has one thread.
    """
    before = dict(os.environ)
    os.environ.update(environment)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does the same; the group exists afterwards in either order
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
            assert isinstance(stream, io.TextIOWrapper), "the controller replaces neither stream"
            stream.reconfigure(line_buffering=True, write_through=True)
        if environment.get("HETSTEP_COMPONENT") == "generate":
            importlib.import_module(ENVIRONMENTS).fork_early()
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # `main` exits by itself
