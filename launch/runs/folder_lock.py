"""Lock a folder that a command writes into, so that one process at a time does. A lock file of another user is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Problem, RecipeError
from pipeline.files.storage import NotOwn, open_own

RETRY_S = 0.2


@contextlib.contextmanager
def hold_lock(folder: Path, key: str, wait_s: float = 0.0) -> Iterator[None]:
    """Create a folder if necessary, and hold its lock during the block.

    key: the folder's key on the command line or in the recipe. wait_s: how long to wait for another process that holds the
    lock. Raises RecipeError if that process keeps it, if the lock belongs to another user, or if the folder cannot be written
    or its file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(open_own(folder / ".lock", os.O_WRONLY | os.O_CREAT), "w")  # noqa: SIM115 closed below
    except NotOwn as error:
        raise RecipeError(Problem(key, "permission-denied", f"{error}, or another {key}=...")) from None
    except OSError as error:
        raise RecipeError(unwritable(folder, key, error)) from None
    deadline = time.monotonic() + wait_s
    with lock:
        while not _locks(lock.fileno(), folder, key):
            if time.monotonic() >= deadline:
                message = f"another process submits to {folder} or evaluates its gates. Try again later, or another {key}=..."
                raise RecipeError(Problem(key, "in-use", message))
            time.sleep(RETRY_S)
        yield


def unwritable(folder: Path, key: str, error: OSError) -> Problem:
    """Return the problem of a folder that cannot be written."""
    return Problem(key, "unwritable", f"{folder} cannot be written: {error.strerror}. Try another {key}=...")


def _locks(descriptor: int, folder: Path, key: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        mount = "Try to mount its file system with locks (Lustre: -o flock), or another"
        raise RecipeError(Problem(key, "no-locks", f"{folder} cannot be locked: {error.strerror}. {mount} {key}=...")) from None
    return True
