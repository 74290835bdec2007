"""The sandbox backend with bubblewrap (`bwrap`, 0.8 or later), a small and well-reviewed program.

Some systems let only bubblewrap make namespaces. By default the root that it builds is writable and unbounded in size, so it is
made read-only here. The device files stay writable mounts, and a program whose user owns them outside of the sandbox could
change their mode. So this backend refuses the user that owns the devices, real root, and `auto` then takes namespaces.
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


def start(spec: ProgramSpec) -> PreparedSandbox:
    """Build a sandbox around a program and return it before the program starts. Raises SandboxError."""
    program = shutil.which(NAME)
    if program is None:
        raise SandboxError(f"{NAME} is not in PATH")
    if any(os.stat(path).st_uid == os.geteuid() for path in DEVICES):
        raise SandboxError("bubblewrap cannot keep a program from changing the mode of device files that this user owns")
    block, go = os.pipe()
    reports, report = os.pipe()
    contents = [sealed_file(name, content) for name, content in spec.files.items()]
    rules = sealed_file("filter", filter_for(platform.machine()))
    arguments = [*_command(spec), *("--seccomp", str(rules), "--block-fd", str(block), "--json-status-fd", str(report))]
    for folder in sorted({parent for name in spec.files for parent in _parents(name)}):
        arguments += ["--dir", f"{SCRATCH}/{folder}"]
    for name, content in zip(spec.files, contents, strict=True):
        arguments += ["--file", str(content), f"{SCRATCH}/{name}"]
    _spawn([program, *arguments, "--", *spec.argv], spec.stdio, (block, report, rules, *contents))
    for descriptor in (block, report, rules, *contents):
        os.close(descriptor)
    line = b""
    while not line.endswith(b"\n"):  # it writes a line piece by piece
        if not (piece := os.read(reports, 1 << 12)):
            raise SandboxError("bubblewrap did not start")
        line += piece
    init = json.loads(line)["child-pid"]
    for number, pair in linux.resource_limits(spec.limits, linux.counts_processes_by_namespace()).items():
        resource.prlimit(init, number, pair)
    return PreparedSandbox(init, go, reports, _status)


def _command(spec: ProgramSpec) -> list[str]:
    arguments = ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    arguments += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--hostname", "sandbox", "--new-session", "--die-with-parent", "--cap-drop", "ALL"]
    arguments += ["--perms", "0700", "--size", str(spec.limits.scratch_bytes), "--tmpfs", SCRATCH]
    for path, to in spec.view.links:
        arguments += ["--symlink", to, path]
    for path in spec.view.mounted:
        arguments += ["--ro-bind", path, path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    if spec.has_proc:
        arguments += ["--proc", "/proc", "--remount-ro", "/proc"]
    for name, value in environment(spec.view).items():
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
        linux.raise_oom_score(PROGRAM_SCORE)
        default_signals()
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        for number, descriptor in enumerate(stdio):
            os.dup2(descriptor, number)
        os.execve(command[0], command, ENVIRONMENT)
    finally:
        os._exit(127)


def _status(report: bytes, ended: bool) -> int | None:
    """Return the program's exit status from bubblewrap's report, which shows signal N as 128 + N like a shell.

    Raises SandboxError if the report ended without a status, for example because bubblewrap could not start the program.
    """
    for line in report.decode().splitlines():
        code = json.loads(line).get("exit-code") if line.endswith("}") else None
        if code is not None:
            return code if code <= 128 else 128 - code
    if ended:
        raise SandboxError("bubblewrap exited without reporting the program's status")
    return None


def sealed_file(name: str, content: bytes) -> int:
    """Return a descriptor of an immutable file in memory, positioned at its beginning."""
    descriptor = os.memfd_create(name.replace("/", "-")[-200:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
