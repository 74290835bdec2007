"""Files on a shared folder: it fills up, turns read-only, loses its server, is slow, and shows late what another node wrote.

`retrying` waits for what can be mended while the job holds its nodes, telling so on the log, and ends with an error that says
what to do. What it is given must be safe to do again after it stopped half-way: `write_durably` and `append` are.
Readers of what another node wrote a moment ago take `wait_for` first.
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
    errno.EACCES: "somebody took the permission away, or a ticket of the file system ran out",
    errno.EPERM: "somebody took the permission away, or a ticket of the file system ran out",
    **dict.fromkeys((errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN), SERVER),
    **dict.fromkeys((errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ENODEV), SERVER),
}
"""What a file system may say that somebody, or it itself, can mend -> what to do."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
TELL_EVERY_S = 60.0
SLOW_S = 5.0
"""A write that takes longer is told."""
SEEN_S = 120.0
"""How long a node may take to see what another wrote: NFS caches names and attributes for up to 60 s (nfs(5), acdirmax)."""


class StorageError(RuntimeError):
    """A file could not be written, or read, for as long as there was patience."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long to try again, what to ask before each try, and what to say when it has come to an end."""

    seconds: float = 0.0
    check: Callable[[], None] = lambda: None  # raises if somebody else may write there by now
    kept: Callable[[], str] = lambda: ""  # what of the run is safe
    key: str = "cluster.timeouts.storage"  # where the seconds are from


NO_RETRIES = RetryPolicy()


def retrying(work: Callable[[], Result], doing: str, path: Path, retry: RetryPolicy, nbytes: int = 0) -> Result:
    """What `work` gives, which is done again for as long as there is patience while it raises an OSError of `REMEDY`.

    doing: "writing ..." or "reading ...", for the log, as is `nbytes`. Raises StorageError when patience ends, and what else
    `work` or `retry.check` raises at once.
    """
    begun, told, pause = time.monotonic(), None, FIRST_PAUSE_S
    while True:
        try:
            retry.check()
            result = work()
        except OSError as error:
            if error.errno not in REMEDY:
                raise
            waited = time.monotonic() - begun
            if waited + pause > retry.seconds:
                raise StorageError(_verdict(_said(doing, path, error), error, retry)) from error
            if told is None or time.monotonic() - told >= TELL_EVERY_S:
                told = time.monotonic()
                again = f"trying again, for {retry.seconds - waited:.0f} s more"
                logger.warning(f"{_said(doing, path, error)}; {REMEDY[error.errno]}; {again}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            continue
        took = time.monotonic() - begun
        if told is not None:
            logger.info(f"{doing}: {path}: done after {took:.1f} s")
        elif took > SLOW_S:
            tell_slow(f"{doing}: {path}", took, nbytes)
        return result


def tell_slow(what: str, took_s: float, nbytes: int = 0) -> None:
    rate = f", {nbytes / 1e6 / took_s:,.2f} MB/s" if nbytes else ""
    logger.warning(f"{what}: took {took_s:.1f} s{rate}; the folder is slow")


def _verdict(said: str, error: OSError, retry: RetryPolicy) -> str:
    waited = f", after {retry.seconds:g} s of trying again ({retry.key})" if retry.seconds else ""
    remedy = REMEDY[error.errno]
    advice = f"{remedy[0].upper()}{remedy[1:]}; the same command then goes on from the last checkpoint"
    return ". ".join(filter(None, (said + waited, advice, retry.kept())))


def _said(doing: str, path: Path, error: OSError) -> str:
    return f"{doing}: {path}: {error.strerror} ({errno.errorcode[error.errno]}){_space(path)}"


def _space(path: Path) -> str:
    """What is left where a file is or would be, as far as the file system tells; a quota may leave less."""
    with contextlib.suppress(OSError, StopIteration):
        status = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
        free, size = (blocks * status.f_frsize / 1e6 for blocks in (status.f_bavail, status.f_blocks))
        inodes = f" and {status.f_favail} inodes" if status.f_files else ""
        return f"; {free:,.1f} of {size:,.1f} MB{inodes} are free there"
    return ""


# ---- writing ------------------------------------------------------------------------------------------------------------


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """The file is on the disk when this returns. Readers see the old one or the new one, never a part.

    mode: its permissions, less those that the umask takes away.
    """
    beside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)  # of a process that was killed, or a link that another user has put there
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
    """Write at byte `at`, where the file ends or an earlier try left something; the file's new size.

    The file is opened anew each time: an open one may have gone stale. durable: on the disk when this returns.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
        file.truncate(at)
        file.seek(at)
        rest = memoryview(data)
        try:
            while rest:  # a full disk takes a part, and says so at the next write only
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(at)
            raise
    return at + len(data)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def errors_of_rust() -> Iterator[None]:
    """Raise OSError where a library written in Rust raises its own: `... No space left on device (os error 28)`."""
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
    """A link, no file, or another user's: whoever put it there could have us read his words or write over our own files."""


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user's and return its descriptor, which the caller closes. Raises NotOwn for anything else.

    The owner must be this process's effective user, for root too: a file system that shows root's own files as nobody's
    (root_squash of NFS) cannot tell them from another's.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # a pipe must not block
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOwn(f"{path} is a link, which could lead anywhere: delete it") from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    kind = "is no regular file" if status.st_uid == os.geteuid() else f"belongs to {user_name(status.st_uid)}, not to you"
    raise NotOwn(f"{path} {kind}: delete it")


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# ---- reading ------------------------------------------------------------------------------------------------------------


def listed(path: Path) -> bool:
    """Whether `path` is there, asked by listing its folder: an NFS client caches that a single name does not exist."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def wait_for(path: Path, patience_s: float = SEEN_S) -> None:
    """Until this node sees a file that another one has written. Raises StorageError."""
    seen_within(patience_s, lambda: listed(path), path)


def seen_within(patience_s: float, seen: Callable[[], Result], path: Path) -> Result:
    """What `seen` gives as soon as that is true; asked again until then, also if it raises OSError. Raises StorageError."""
    begun, told = time.monotonic(), False
    while True:
        try:
            if found := seen():
                return found
            why = ""
        except OSError as error:
            why = f" ({error})"
        waited = time.monotonic() - begun
        if waited > patience_s:
            raise StorageError(
                f"{path} is not there, or not whole, on {socket.gethostname()} after {patience_s:g} s{why}; all nodes must see"
                " the same folder, and it must not be changed by hand while a job runs"
            )
        if not told and waited > SLOW_S:
            logger.warning(f"waiting for {path}: not there, or not whole, on {socket.gethostname()}{why}")
            told = True
        time.sleep(min(0.1 + waited / 10, 2.0))
