"""Open and lock files that several users write. Whoever may write into the folder may write the files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.files.storage import sync, user_name

RETRY_S = 0.02


class Unusable(Exception):
    """Raised if a file cannot be opened or locked. `code` is a problem's code, `why` and `remedy` are parts of its message."""

    def __init__(self, code: str, why: str, remedy: str):
        """code: a problem's code. why: a clause such as `which cannot be locked: ...`. remedy: what to try."""
        super().__init__(why)
        self.code, self.why, self.remedy = code, why, remedy


def open_shared(path: Path) -> int:
    """Return the descriptor of a file to read and append to, created if necessary; the caller closes it. Raises Unusable."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        # O_CREAT of another user's file is refused in a folder such as /tmp (proc(5), fs.protected_regular).
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            descriptor = _create(path, flags)
    except OSError as error:
        code = "permission-denied" if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP) else "unwritable"
        remedy = f"one that {user_name(os.geteuid())} may write"
        raise Unusable(code, f"whose {path.name} cannot be opened: {error.strerror}", remedy) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise Unusable("permission-denied", f"whose {path.name} is not a regular file", "to delete it")


def _create(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another writer has just created it
        return os.open(path, flags)
    shared = stat.S_IMODE(path.parent.stat().st_mode) & 0o022
    os.fchmod(descriptor, 0o600 | shared | shared << 1)  # who may write may read
    sync(path.parent)
    return descriptor


def lock(descriptor: int, wait_s: float) -> None:
    """Lock a file against other writers until its descriptor is closed, also over NFS. Raises Unusable after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Unusable("in-use", f"locked by another process for {wait_s:g} s", "the same command again") from None
            time.sleep(RETRY_S)
        except OSError as error:
            remedy = "a file system with locks (Lustre: -o flock)"
            raise Unusable("no-locks", f"which cannot be locked: {error.strerror}", remedy) from None


@contextlib.contextmanager
def lock_file(path: Path, wait_s: float) -> Iterator[int]:
    """Open and lock a file during the block, and yield its descriptor. Raises Unusable."""
    descriptor = open_shared(path)
    try:
        lock(descriptor, wait_s)
        yield descriptor
    finally:
        os.close(descriptor)
