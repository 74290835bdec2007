"""The process between a rank and one program in the sandbox: starts it, watches what it uses, ends it, tells what came of it.

    python -I -S -c "... guard.main()" RANK

It reads one line of JSON (see `guard_client.py`) and the contents of files from stdin; answers with one line of JSON and the
program's output on stdout. It is the reaper of all that its descendants leave behind, so that nothing is left when it ends.
When the rank dies it ends everything; when it dies itself, the kernel does.

A program that is talked to has the rank's pipes for stdin and stdout; the end of the guard's stdin ends it.
Hundreds of them may wait for what a policy says next. One that uses nothing is looked at ever less often, until a byte on the
guard's stdin says that it is asked something.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import replace

from pipeline.sandbox import bubblewrap, cgroup, linux, namespaces, processes
from pipeline.sandbox.file_system import SCRATCH, FileSystemView
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.namespaces import PreparedSandbox, ProgramSpec

TICK_S = 0.02  # between two looks at what it uses
IDLE_TICK_S = 0.5  # at most, for a program that is talked to, while it uses nothing
CHUNK = 1 << 16
QUIET = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)]
PAGE = os.sysconf("SC_PAGE_SIZE")  # of which a file takes whole ones


def main() -> None:
    rank = int(sys.argv[1])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.offer_to_oom_killer(namespaces.PROGRAM_SCORE - 1)
    linux.prctl(linux.PR_SET_THP_DISABLE, 1)  # also for all below: of a huge page that is unmapped but for 4 KB all 2 MB stay
    asked = json.loads(sys.stdin.buffer.readline())
    files = {name: sys.stdin.buffer.read(size) for name, size in asked["files"].items()}
    stdin = sys.stdin.buffer.read(asked["stdin"])
    folder = tempfile.mkdtemp(prefix="sandbox-") if asked["way"] == "none" else ""
    try:
        answer, outputs = _run(asked, files, stdin, folder, rank)
    except SandboxError as error:
        answer, outputs = {"error": str(error)}, []
    finally:
        _end_all()
        cgroup.remove()
        if folder:
            _remove(folder)
    sys.stdout.buffer.write(json.dumps({**answer, "outputs": [len(output) for output in outputs]}).encode() + b"\n")
    sys.stdout.buffer.write(b"".join(outputs))


def _run(asked: dict, files: dict[str, bytes], stdin: bytes, folder: str, rank: int) -> tuple[dict, list[bytes]]:
    """The answer, and what the program wrote to stdout and stderr."""
    limits, way = ResourceLimits(**asked["limits"]), asked["way"]
    talked_to = asked["talk"]
    if sum(-(-len(content) // PAGE) * PAGE for content in files.values()) > limits.scratch_bytes:
        return {"status": -signal.SIGKILL, "ended_by": "memory", "seconds": 0.0}, [b"", b""]
    writers: tuple[int, int] | None = None
    if talked_to:
        nothing = os.open(os.devnull, os.O_WRONLY)
        stdio, outputs = (*talked_to, nothing), {}
    else:
        out, err = os.pipe(), os.pipe()
        stdio = (bubblewrap.sealed("stdin", stdin), out[1], err[1])
        writers, outputs = (out[1], err[1]), {out[0]: bytearray(), err[0]: bytearray()}
        for reader in outputs:
            os.set_blocking(reader, False)
    job = ProgramSpec(asked["argv"], files, stdio, FileSystemView(**asked["view"]), limits, asked["proc"], folder)
    inside = bubblewrap.start(job) if way == "bubblewrap" else namespaces.start(job, contained=way == "namespaces")
    for descriptor in writers or talked_to:
        os.close(descriptor)
    cgroup.join(inside.pid, limits)
    watch = _Watch(inside, limits, outputs, rank, bool(talked_to))
    begun = time.monotonic()
    os.write(inside.go, b"1")
    status, cause = watch.until_it_ends()
    seconds = time.monotonic() - begun
    _end_all()
    if cgroup.ran_out():
        status, cause = -signal.SIGKILL, "memory"
    watch.drain()
    written = [bytes(output) for output in outputs.values()]
    if sum(map(len, written)) > limits.output_bytes:
        written = [written[0][: limits.output_bytes], written[1][: max(0, limits.output_bytes - len(written[0]))]]
        cause = "output" if cause == "exit" else cause
    return {"status": status, "ended_by": cause, "seconds": seconds}, written


def _end_all() -> None:
    """Kills what was started here and waits for its end, and then what that leaves to us, until nothing is left."""
    while True:
        for child in processes.children(os.getpid()):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself
        try:
            os.wait()
        except ChildProcessError:
            return


def _remove(folder: str) -> None:
    """What a program has left, which may be gone, deeply nested, or shut to its owner. Its processes have ended."""
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        os.waitpid(os.posix_spawnp(command[0], command, os.environ, file_actions=QUIET), 0)


class _Watch:
    """outputs: what is read from each descriptor, filled here."""

    def __init__(
        self, inside: PreparedSandbox, limits: ResourceLimits, outputs: dict[int, bytearray], rank: int, talked_to: bool
    ) -> None:
        self._inside, self._limits, self._outputs, self._rank = inside, limits, outputs, rank
        self._control = sys.stdin.fileno() if talked_to else None
        self._told = b""
        self._poll = select.poll()
        for descriptor in (*outputs, inside.reports, *([self._control] if talked_to else [])):
            self._poll.register(descriptor, select.POLLIN)
        self._meter, self._used = processes.UsageMeter(inside.pid), processes.ResourceUsage(0, 0, 0.0)
        self._tick_s = TICK_S

    def until_it_ends(self) -> tuple[int, str]:
        """Its status and what ended it; -SIGKILL if it has to be ended."""
        begun = time.monotonic()
        look, ended = begun, False
        while True:
            for descriptor, _ in self._poll.poll(1e3 * max(0.0, look - time.monotonic())):
                try:
                    chunk = os.read(descriptor, CHUNK)
                except BlockingIOError:
                    continue  # the program has read its own output
                if descriptor in self._outputs:
                    self._outputs[descriptor] += chunk
                elif descriptor == self._inside.reports:
                    self._told += chunk
                if not chunk:
                    self._poll.unregister(descriptor)
                    if descriptor == self._control:
                        return -signal.SIGKILL, "closed"
                    ended = ended or descriptor == self._inside.reports
                elif descriptor == self._control:
                    look, self._tick_s = time.monotonic(), TICK_S / 2  # it uses nothing yet, which is to make TICK_S of it
            if (status := self._inside.status(self._told, ended)) is not None:
                return status, self._judge(status)
            if sum(map(len, self._outputs.values())) > self._limits.output_bytes:
                return -signal.SIGKILL, "output"
            if (now := time.monotonic()) >= look:
                if cause := self._exceeded(now - begun):
                    return -signal.SIGKILL, cause
                look = now + self._tick_s

    def _judge(self, status: int) -> str:
        if status >= 0:
            return "exit"
        beyond = status == -signal.SIGKILL and self._used.cpu_s > self._limits.cpu_s - 2 * TICK_S
        return "cpu time" if status == -signal.SIGXCPU or beyond else f"signal {-status}"

    def _exceeded(self, seconds: float) -> str | None:
        limits = self._limits
        if os.getppid() != self._rank:
            raise SandboxError("the rank is gone")
        if seconds > limits.wall_s:
            return "wall time"
        used = self._meter.look()
        used = replace(used, cpu_s=max(used.cpu_s, cgroup.cpu_s()))
        idle = self._control is not None and used == self._used
        self._used, self._tick_s = used, min(2 * self._tick_s, IDLE_TICK_S) if idle else TICK_S
        if used.processes > limits.processes:
            return "processes"
        if used.memory_bytes > limits.memory_bytes:
            return "memory"
        if used.cpu_s > limits.cpu_s:
            return "cpu time"
        return "memory" if self._files() > limits.scratch_files else None

    def _files(self) -> int:
        """How many the scratch folder has; 0 where it is not bubblewrap's, or cannot be seen: the kernel counts the others."""
        try:
            scratch = os.statvfs(f"/proc/{self._inside.pid}/root{SCRATCH}")
        except OSError:
            return 0
        built = scratch.f_blocks * scratch.f_frsize < self._limits.scratch_bytes + (1 << 16)  # until then it is the machine's
        return scratch.f_files - scratch.f_ffree if built else 0

    def drain(self) -> None:
        """What was written before the end. All of the program's processes are gone by now."""
        for descriptor, output in self._outputs.items():
            with contextlib.suppress(BlockingIOError):  # uncontained, it may have given its end to another's process
                while len(output) <= self._limits.output_bytes and (chunk := os.read(descriptor, CHUNK)):
                    output += chunk
