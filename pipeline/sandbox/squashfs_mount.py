"""Mount a squashfs file once on a node for all containers, by squashfuse in a mount namespace that they join.

The process that keeps the mount belongs to no rank: containers of several ranks share it. It ends when no container has used it
for LINGER_S. If it is killed, as by the end of a job, its namespace and the mount go with it. A mount outside of the namespace
never exists.

    LOCK            held by who looks for that process or starts it
    LOCK.users      shared by containers, until they end; the process that keeps the mount ends when it can lock the file
    LOCK.keeper     its id and start time
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

from pipeline.sandbox import linux
from pipeline.sandbox.file_system import USER
from pipeline.sandbox.limits import SandboxError

PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first is faster, and takes an owner from version 0.2 on
NAME = b"squashfs keeper"
DEVICE = "/dev/fuse"
LINGER_S = 10.0
MOUNT_S = 20.0
POLL_S = 0.01


def join(image: str, offset: int, lock: str, folder: str) -> None:
    """Enter a mount namespace in which `folder` is the mounted file.

    offset: bytes of the file before its squashfs. lock: a path in the node's cache, of this file and of this process's
    namespaces. The namespace stays while this process lives. Raises SandboxError if squashfuse does not work here.
    """
    fcntl.flock(os.open(f"{lock}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)  # open until the end
    with open(lock, "a") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if (keeper := _running(lock)) is None:
            keeper = _started(image, offset, lock, folder)
    linux.call("setns", keeper, linux.NEWNS if linux.is_root() else linux.NEWUSER | linux.NEWNS)
    os.close(keeper)


def _started(image: str, offset: int, lock: str, folder: str) -> int:
    """Start a process that keeps the mount, and return a descriptor of it. Raises SandboxError."""
    programs = [program for program in map(linux.program, PROGRAMS) if program]
    if not programs:
        raise SandboxError("there is no squashfuse")
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise SandboxError(f"this user may not use {DEVICE}")
    owner = USER if linux.is_root() else 0
    options = f"ro,allow_other,uid={owner},gid={owner}{f',offset={offset}' if offset else ''}"
    reasons: list[str] = []
    for program in programs:
        reasons.append(f"{program}: {_start([program, '-f', '-o', options, image, folder], lock)}")
        if (keeper := _running(lock)) is not None:
            return keeper
    raise SandboxError("; ".join(reasons))


def _running(lock: str) -> int | None:
    """Return a descriptor of the process that keeps the mount; None if it does not run."""
    try:
        with open(f"{lock}.keeper") as file:
            pid, started = map(int, file.read().split())
        keeper = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if linux.start_ticks(pid) == started:
        return keeper
    os.close(keeper)
    return None


def _start(command: list[str], lock: str) -> str:
    """Start the process that keeps the mount, wait until the file is mounted, and return what it says."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            linux.prctl(linux.PR_SET_NAME, NAME)  # before the container server adopts it
            if os.fork() == 0:
                _keep(command, lock, writer)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    os.close(writer)
    answer = os.read(reader, 1000).decode(errors="replace")
    os.close(reader)
    return answer or "it ended at once"


def _keep(command: list[str], lock: str, writer: int) -> None:
    """Mount the file, and end when no container uses it. Never returns."""
    try:
        linux.close_all({writer})
        if linux.is_root():
            linux.call("unshare", linux.NEWNS)
        else:
            linux.enter_user_namespace(linux.NEWNS)
        linux.make_mounts_private()
        errors, errors_writer = os.pipe()
        folder = command[-1]
        before = os.stat(folder).st_dev
        if (child := os.fork()) == 0:
            os.close(writer)
            linux.die_with_parent()
            os.dup2(errors_writer, 2)
            os.execv(command[0], command)
        until = time.monotonic() + MOUNT_S
        while os.stat(folder).st_dev == before:
            if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > until:
                os.set_blocking(errors, False)
                raise SandboxError(os.read(errors, 1000).decode(errors="replace").strip())
            time.sleep(POLL_S)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # so that containers of this user can join
        with open(f"{lock}.keeper.new", "w") as file:
            file.write(f"{os.getpid()} {linux.start_ticks(os.getpid())}")
        os.rename(f"{lock}.keeper.new", f"{lock}.keeper")
        os.write(writer, b"mounted")
        os.close(writer)
        _wait_until_unused(child, lock)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(writer, str(error).encode()[:1000] or b"it did not mount")
    finally:
        os._exit(0)


def _wait_until_unused(child: int, lock: str) -> None:
    users, used = os.open(f"{lock}.users", os.O_RDWR), time.monotonic()
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(LINGER_S / 20)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            used = time.monotonic()
            continue
        if time.monotonic() - used > LINGER_S:
            break  # and keep the lock, so that nobody joins what ends
        fcntl.flock(users, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.unlink(f"{lock}.keeper")
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
