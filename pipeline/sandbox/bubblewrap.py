"""The sandbox by bubblewrap (`bwrap`, 0.8 or later): a small program, well reviewed, that some systems trust with namespaces
where they trust nobody else.

Its root is made read-only here, as it leaves it writable and without a size. Devices stay writable mounts: a program could
change their mode if it were their owner outside. So who owns them, really root, is refused, and takes plain namespaces.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import shutil

from pipeline.sandbox import linux
from pipeline.sandbox.file_system import DEVICES, ENVIRONMENT, SCRATCH, USER, environment
from pipeline.sandbox.limits import SandboxError
from pipeline.sandbox.namespaces import PROGRAM_SCORE, PreparedSandbox, ProgramSpec, default_signals
from pipeline.sandbox.seccomp import filter_for

NAME = "bwrap"


def start(job: ProgramSpec) -> PreparedSandbox:
    """Raises SandboxError with what bubblewrap said."""
    program = shutil.which(NAME)
    if program is None:
        raise SandboxError(f"no {NAME} in PATH")
    if any(os.stat(path).st_uid == os.geteuid() for path in DEVICES):
        raise SandboxError("this user owns the machine's devices, and bubblewrap cannot show them unchangeable")
    block, go = os.pipe()
    reports, report = os.pipe()
    contents = [sealed(name, content) for name, content in job.files.items()]
    rules = sealed("filter", filter_for(platform.machine()))
    arguments = [*_command(job), *("--seccomp", str(rules), "--block-fd", str(block), "--json-status-fd", str(report))]
    for folder in sorted({parent for name in job.files for parent in _parents(name)}):
        arguments += ["--dir", f"{SCRATCH}/{folder}"]
    for name, content in zip(job.files, contents, strict=True):
        arguments += ["--file", str(content), f"{SCRATCH}/{name}"]
    _spawn([program, *arguments, "--", *job.argv], job.stdio, (block, report, rules, *contents))
    for descriptor in (block, report, rules, *contents):
        os.close(descriptor)
    told = b""
    while not told.endswith(b"\n"):  # it writes a line piece by piece
        if not (piece := os.read(reports, 1 << 12)):
            raise SandboxError("bubblewrap did not start")
        told += piece
    init = json.loads(told)["child-pid"]
    for number, pair in linux.bounds(job.limits, linux.counts_processes_by_namespace()).items():
        resource.prlimit(init, number, pair)
    return PreparedSandbox(init, go, reports, _status)


def _command(job: ProgramSpec) -> list[str]:
    arguments = ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--hostname", "sandbox", "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    arguments += ["--perms", "0700", "--size", str(job.limits.scratch_bytes), "--tmpfs", SCRATCH]
    for path, to in job.view.links:
        arguments += ["--symlink", to, path]
    for path in job.view.mounted:
        arguments += ["--ro-bind", path, path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    if job.proc:
        arguments += ["--proc", "/proc", "--remount-ro", "/proc"]
    for name, value in environment(job.view).items():
        arguments += ["--setenv", name, value]
    return [*arguments, "--remount-ro", "/", "--chdir", SCRATCH]


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _spawn(command: list[str], stdio: tuple[int, int, int], inherited: tuple[int, ...]) -> None:
    if os.fork():
        return
    try:
        linux.die_with_parent()
        linux.offer_to_oom_killer(PROGRAM_SCORE)
        default_signals()
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        os.execve(command[0], command, ENVIRONMENT)
    finally:
        os._exit(127)


def _status(told: bytes, ended: bool) -> int | None:
    """bubblewrap tells a signal as shells do, by 128 more. It tells nothing of a program that it could not start."""
    for line in told.decode().splitlines():
        code = json.loads(line).get("exit-code") if line.endswith("}") else None
        if code is not None:
            return code if code <= 128 else 128 - code
    if ended:
        raise SandboxError("bubblewrap ended without a word of how its program did")
    return None


def sealed(name: str, content: bytes) -> int:
    """A file in memory that nobody can change, at its beginning."""
    descriptor = os.memfd_create(name.replace("/", "-")[-200:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
