"""Write and read files on a shared folder that may fill up, turn read-only, lose its server, be slow or show new files late.

`retrying` repeats work that fails, so that an administrator can fix the cause while the job keeps its nodes. It logs the
failures and finally raises an error that says what to do. The work must be safe to repeat after it stopped half-way, as
`write_durably` and `append` are.
Call `wait_for` before reading what another node has just written.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FREE = "free space there, or ask for a larger quota"
SERVER = "the file system or its server does not answer as it should: ask its administrator"
REMEDY = {
    errno.ENOSPC: FREE,
    errno.EDQUOT: FREE,
    errno.EROFS: "it is mounted read-only now, often by the kernel after an error: ask its administrator",
    errno.EACCES: "restore the permission, or renew the file system's ticket, if it has expired",
    errno.EPERM: "restore the permission, or renew the file system's ticket, if it has expired",
    **dict.fromkeys((errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN), SERVER),
    **dict.fromkeys((errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ENODEV), SERVER),
}
"""Errors of a file system that may pass or that somebody can fix -> what to do."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
LOG_EVERY_S = 60.0
SLOW_S = 5.0
"""A write that takes longer is logged."""
SEEN_S = 120.0
"""Seconds until a node must see another node's write: NFS caches names and attributes for up to 60 s (nfs(5), acdirmax)."""


class StorageError(RuntimeError):
    """Raised if a file could not be written or read within the retry time."""


@dataclass(frozen=True)
class RetryPolicy:
    """How an operation on a file is retried: for how long, the check before each try, and additions to the final error."""

    seconds: float = 0.0
    check: Callable[[], None] = lambda: None  # raises if another attempt may write there
    kept: Callable[[], str] = lambda: ""  # says which part of the run is safe
    key: str = "cluster.timeouts.storage"  # the recipe's key of `seconds`


NO_RETRIES = RetryPolicy()


def retrying(work: Callable[[], Result], doing: str, path: Path, retry: RetryPolicy, nbytes: int = 0) -> Result:
    """Call `work` and return its result. Within the retry time, repeat the call if it raises an OSError listed in `REMEDY`.

    doing: "writing ..." or "reading ...", for the log. nbytes: bytes written or read, for the log. Raises StorageError after
    the retry time. All other errors of `work` and `retry.check` propagate at once.
    """
    begun, logged_at, pause = time.monotonic(), None, FIRST_PAUSE_S
    while True:
        try:
            retry.check()
            result = work()
        except OSError as error:
            if error.errno not in REMEDY:
                raise
            waited = time.monotonic() - begun
            if waited + pause > retry.seconds:
                raise StorageError(_verdict(_describe_error(doing, path, error), error.errno, retry)) from error
            if logged_at is None or time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                again = f"trying again, for {retry.seconds - waited:.0f} s more"
                logger.warning(f"{_describe_error(doing, path, error)}; {REMEDY[error.errno]}; {again}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            continue
        took = time.monotonic() - begun
        if logged_at is not None:
            logger.info(f"{doing}: {path}: done after {took:.1f} s")
        elif took > SLOW_S:
            tell_slow(f"{doing}: {path}", took, nbytes)
        return result


def tell_slow(operation: str, took_s: float, nbytes: int = 0) -> None:
    """Log that an operation was slow, with its rate."""
    rate = f", {nbytes / 1e6 / took_s:,.2f} MB/s" if nbytes else ""
    logger.warning(f"{operation}: took {took_s:.1f} s{rate}; the folder is slow")


def _verdict(failure: str, number: int, retry: RetryPolicy) -> str:
    waited = f", after {retry.seconds:g} s of trying again ({retry.key})" if retry.seconds else ""
    remedy = REMEDY[number]
    advice = f"{remedy[0].upper()}{remedy[1:]}; the same command then goes on from the last checkpoint"
    return ". ".join(filter(None, (failure + waited, advice, retry.kept())))


def _describe_error(doing: str, path: Path, error: OSError) -> str:
    return f"{doing}: {path}: {error.strerror} ({errno.errorcode[error.errno or 0]}){_space(path)}"


def _space(path: Path) -> str:
    """Return a text about the free space on the file system of `path`. A quota may leave less than that."""
    with contextlib.suppress(OSError, StopIteration):
        status = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
        free, size = (blocks * status.f_frsize / 1e6 for blocks in (status.f_bavail, status.f_blocks))
        inodes = f" and {status.f_favail} inodes" if status.f_files else ""
        return f"; {free:,.1f} of {size:,.1f} MB{inodes} are free there"
    return ""


# ---- writing ------------------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file that is on disk when this returns. Readers see the old or the new content, never a part.

    mode: its permissions, before the umask.
    """
    beside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)  # left by a killed process, or a link by another user
        with open(beside, "x", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync(path.parent)


def append(path: Path, at: int, data: bytes, durable: bool = True) -> int:
    """Cut the file at byte `at`, since an earlier try may have written more, and write there. Return the file's new size.

    Opens the file each time: an open handle may have gone stale. durable: the data is on disk when this returns.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.truncate(at)
        file.seek(at)
        unwritten = memoryview(data)
        try:
            while unwritten:  # a full disk takes a part and fails only at the next write
                unwritten = unwritten[file.write(unwritten) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(at)
            raise
    return at + len(data)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def errors_of_rust() -> Iterator[None]:
    """Turn errors of a Rust library in the block into OSErrors: `... No space left on device (os error 28)`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


# ---- whose it is --------------------------------------------------------------------------------------------------------


class NotOwn(PermissionError):
    """Raised for a link, for what is no regular file, and for another user's file.

    Otherwise another user could choose what this process reads or overwrites.
    """


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user and return its descriptor; the caller closes it. Raises NotOwn for anything else.

    The owner must be this process's effective user, for root too: with NFS's root_squash, root's own files look like nobody's
    and cannot be told from another user's.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # a pipe must not block
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwn(f"{path} is a symbolic link; expected a regular file. Try to delete it") from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    kind = "is not a regular file" if status.st_uid == os.geteuid() else f"belongs to {user_name(status.st_uid)}, not to you"
    raise NotOwn(f"{path} {kind}. Try to delete it")


def user_name(uid: int) -> str:
    """Return the login name of a user id, or `user 1234` if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# ---- reading ------------------------------------------------------------------------------------------------------------


def listed(path: Path) -> bool:
    """Return whether `path` is in its folder's listing. An NFS client may wrongly remember that a name does not exist."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def wait_for(path: Path, patience_s: float = SEEN_S) -> None:
    """Wait until this node sees a file that another node has written. Raises StorageError."""
    seen_within(patience_s, lambda: listed(path), path)


def seen_within(patience_s: float, look: Callable[[], Result], path: Path) -> Result:
    """Call `look` until it returns a true value, and return that. Repeat it after an OSError too.

    Raises StorageError, which names `path`, after `patience_s` seconds.
    """
    begun, is_logged = time.monotonic(), False
    while True:
        try:
            if result := look():
                return result
            why = ""
        except OSError as error:
            why = f" ({error})"
        waited = time.monotonic() - begun
        if waited > patience_s:
            raise StorageError(
                f"{path} is missing or incomplete on {socket.gethostname()} after {patience_s:g} s{why}; all nodes must see the"
                " same folder, and nobody may change it while a job runs"
            )
        if not is_logged and waited > SLOW_S:
            logger.warning(f"waiting for {path}: missing or incomplete on {socket.gethostname()}{why}")
            is_logged = True
        time.sleep(min(0.1 + waited / 10, 2.0))
