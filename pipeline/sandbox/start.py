"""Start a program for its guard: in bubblewrap or, with `sandbox: none`, without isolation.

bubblewrap forks process 1 of the sandbox, which forks the program. The program waits for a byte from the guard on the `go`
pipe.

A program of a container enters the namespaces of the process that keeps the container's root (container_root.py), and sees that
root. It is root inside, where no other user exists.

If the guard runs as root of the machine, the program is user 65534 outside of the sandbox too, in a user namespace that is made
here. Otherwise it is the guard's user there, since a user can map only itself. Device files stay writable mounts in the
sandbox. A program whose user owns them outside could change their mode, so for such a user they are mounted read-only first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.sandbox import cgroup, linux
from pipeline.sandbox.file_system import DEVICES, SCRATCH, USER
from pipeline.sandbox.limits import ResourceLimits, SandboxError

PROGRAM_SCORE = 1000  # see linux.raise_oom_score; above the guard's


@dataclass(frozen=True, slots=True)
class StartedProgram:
    """A program that waits for a byte on `go`; it ends if `go` is closed first."""

    child: int  # the guard's child: bubblewrap or, without isolation, the program
    root: int  # the program and all that it starts descend from this process
    go: int
    report: int | None  # bubblewrap's report; None without isolation

    def exit_status(self, killed: bool = False) -> int | None:
        """Reap all children that have ended, and return the program's exit status, or None while it runs.

        killed: whether `kill` was called. Raises SandboxError if bubblewrap failed.
        """
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                if self.report is None:
                    return code
                if killed and code == 128 + signal.SIGKILL:  # perhaps before process 1 had started the program
                    return -signal.SIGKILL
                return _reported_status(self.report, code)
            if pid == 0:
                return None

    def kill(self) -> None:
        """Kill the program: with bubblewrap process 1 of the sandbox, so that bubblewrap lives to report."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child if self.report is None else self.root, signal.SIGKILL)


def _reported_status(report: int, own_status: int) -> int:
    """Return the program's exit status from the report of an ended bubblewrap, which shows signal N as 128 + N like a shell."""
    try:
        lines = os.read(report, 1 << 12).decode().splitlines()
    except BlockingIOError:
        lines = []
    for line in lines:
        code = json.loads(line).get("exit-code")
        if code is not None:
            return code if code <= 128 else 128 - code
    raise SandboxError(f"bubblewrap ended with status {own_status}, before the program")


def start_isolated(
    bubblewrap: list[str],
    rules: bytes,
    argv: list[str],
    files: dict[str, bytes],
    stdio: tuple[int, int, int],
    limits: ResourceLimits,
    container: int | None = None,
) -> StartedProgram:
    """Start a program in bubblewrap. rules: the filter of system calls. stdio: three descriptors above 2.

    container: a descriptor of the process that keeps the root of the program's container; such a program has no `files`. None:
    the program gets a scratch folder. Raises SandboxError.
    """
    block, go = os.pipe()
    report, report_writer = os.pipe()
    contents = {name: sealed_file(name, content) for name, content in files.items()}
    told = sealed_file("options", os.fsencode("\0".join(bubblewrap[1:])))  # each user could read variables in arguments
    inherited = [block, report_writer, told, filter_file := sealed_file("filter", rules), *contents.values()]
    options = ["--perms", "0700", "--size", str(limits.scratch_bytes), "--tmpfs", SCRATCH]  # first: others may lie below it
    keeper = None
    if container is not None:
        options = ["--unshare-user"]
    elif linux.is_root():
        users, keeper = _namespace_of_nobody()
        inherited.append(users)
        options += ["--userns", str(users), "--sync-fd", str(users)]  # the second closes it for the program
    else:
        options += ["--unshare-user"]
    options += ["--args", str(told), "--seccomp", str(filter_file)]
    options += ["--block-fd", str(block), "--json-status-fd", str(report_writer)]
    for folder in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
        options += ["--dir", f"{SCRATCH}/{folder}"]
    for name, descriptor in contents.items():
        options += ["--file", str(descriptor), f"{SCRATCH}/{name}"]

    def prepare() -> None:
        if linux.is_root():
            os.setgroups([])
        if container is not None:
            _enter(container)
        elif not linux.is_root() and any(os.stat(path).st_uid == os.geteuid() for path in DEVICES):
            _protect_devices()
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)

    child = _spawn([bubblewrap[0], *options, "--", *argv], {}, stdio, prepare)
    for descriptor in inherited:
        os.close(descriptor)
    init = _started_pid(report)
    if keeper is not None:
        with contextlib.suppress(BrokenPipeError):  # its reader has been killed: the guard's own end is then not watched
            os.write(keeper, str(init).encode())
    _limit(init, limits, linux.counts_processes_by_namespace(), container is not None)
    return StartedProgram(child, init, go, report)


def _started_pid(report: int) -> int:
    """Return the process id that bubblewrap reports first, and make `report` non-blocking. Raises SandboxError."""
    line = b""
    while not line.endswith(b"\n"):  # it writes a line piece by piece
        if not (piece := os.read(report, 1 << 12)):
            raise SandboxError("bubblewrap did not start")
        line += piece
    os.set_blocking(report, False)
    return json.loads(line)["child-pid"]


def _enter(container: int) -> None:
    """Enter a container's namespaces, as its root."""
    linux.call("setns", container, linux.NEWUSER | linux.NEWNS | linux.NEWNET)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.die_with_parent()  # anew, after a change of user


def start_free(
    argv: list[str],
    files: dict[str, bytes],
    stdio: tuple[int, int, int],
    limits: ResourceLimits,
    environment: dict[str, str],
    folder: str,
) -> StartedProgram:
    """Start a program in `folder` without isolation. The guard adopts its orphans."""
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    block, go = os.pipe()

    def prepare() -> None:
        os.setsid()  # no terminal
        os.chdir(folder)
        os.close(go)
        if not os.read(block, 1):
            os._exit(1)

    child = _spawn(argv, environment | {"HOME": folder, "TMPDIR": folder}, stdio, prepare)
    os.close(block)
    _limit(child, limits, count_processes=False)
    return StartedProgram(child, os.getpid(), go, None)


def _spawn(argv: list[str], environment: dict[str, str], stdio: tuple[int, int, int], prepare: Callable[[], None]) -> int:
    """Fork, call `prepare` in the child and execute a program there. Return the child's id."""
    if child := os.fork():
        return child
    try:
        linux.die_with_parent()
        linux.raise_oom_score(PROGRAM_SCORE)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # Python ignores some
            signal.signal(number, signal.SIG_DFL)
        prepare()
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        os.execve(argv[0], argv, environment)
    except BaseException as error:
        os.write(stdio[2], f"{argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _limit(pid: int, limits: ResourceLimits, count_processes: bool, in_container: bool = False) -> None:
    """Set the limits of a process and of all that it starts, and give it a cgroup where one is delegated."""
    pairs = linux.resource_limits(limits, count_processes, in_container)

    def work() -> None:
        for number, pair in pairs.items():
            resource.prlimit(pid, number, pair)

    try:
        try:
            work()
        except PermissionError:  # root without CAP_SYS_RESOURCE may not limit nobody's processes, as in some containers
            if not linux.is_root():
                raise
            _as_nobody(work)
    except ProcessLookupError:  # bubblewrap has failed in the meantime, and will report so
        return
    cgroup.join(pid, limits)


def _as_nobody(work: Callable[[], object]) -> None:
    """Do something as the user of a container's programs, which some containers' root needs. Raises ProcessLookupError."""
    if (child := os.fork()) == 0:
        try:
            linux.become_nobody()
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise ProcessLookupError


def _namespace_of_nobody() -> tuple[int, int]:
    """Return descriptors of a new user namespace for bubblewrap, with the machine's nobody and root, and of a pipe.

    Root is user 1 there. If it were 0, bubblewrap would lose its capabilities when it becomes nobody; without it, bubblewrap
    could not mount what only root may read, such as Python in root's home folder.

    The process that makes the namespace waits for the id of the sandbox's process 1 on the pipe, and kills that process when
    the guard dies. The kernel does not: bubblewrap's own end sends the signal, without the right to kill nobody's processes.
    """
    reader, writer = os.pipe()
    watched, keeper = os.pipe()
    maker = os.fork()
    if maker == 0:
        try:
            for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {writer, watched}:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(descriptor)
            linux.call("unshare", linux.NEWUSER)
            os.write(writer, b"1")
            os.close(writer)
            if (init := os.read(watched, 32)) and not os.read(watched, 1):  # empty: the guard has ended
                os.kill(int(init), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writer)
    os.close(watched)
    try:
        os.read(reader, 1)
        for kind in ("uid", "gid"):
            Path(f"/proc/{maker}/{kind}_map").write_text(f"1 0 1\n{USER} {USER} 1\n")
        return os.open(f"/proc/{maker}/ns/user", os.O_RDONLY), keeper
    except OSError as error:
        raise SandboxError(f"the kernel refuses a user namespace: {error}") from None
    finally:
        os.close(reader)


def _protect_devices() -> None:
    """Make the device files read-only mounts in a new mount namespace: their content stays writable, their mode does not."""
    user, group = os.geteuid(), os.getegid()
    try:
        linux.call("unshare", linux.NEWNS)
    except PermissionError:  # without CAP_SYS_ADMIN, such as root of most containers; a user namespace gives it
        linux.call("unshare", linux.NEWUSER | linux.NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1\n")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1\n")
    linux.make_mounts_private()
    for path in DEVICES:
        linux.protect_device(path, path)


def sealed_file(name: str, content: bytes) -> int:
    """Return a descriptor of an immutable file in memory, positioned at its beginning."""
    descriptor = os.memfd_create(name.replace("/", "-")[-200:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
