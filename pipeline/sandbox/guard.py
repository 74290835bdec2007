"""The process between a rank and one program in the sandbox: starts the program, watches it, ends it and reports its result.

    python -I -S -c "... guard.main()" RANK

It reads one line of JSON (see `guard_client.py`) and the contents of files from stdin, and writes one line of JSON and the
program's output to stdout. All orphans among its descendants become its children, so nothing is left when it ends. When the
rank dies, the guard ends everything; when the guard dies, the kernel does or, for root, the process that made the namespace.
The end of a container's keeper ends a program that runs there.

An interactive program has the rank's pipes as stdin and stdout, and the end of the guard's stdin ends it. Hundreds of them may
wait for the policy at the same time, so the guard samples an idle one less and less often, until a byte on the guard's stdin
announces input for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import replace

from pipeline.sandbox import cgroup, linux, processes, start
from pipeline.sandbox.file_system import SCRATCH
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.start import StartedProgram

TICK_S = 0.02  # between two samples of resource usage
IDLE_TICK_S = 0.5  # at most, for an interactive program that uses nothing
CHUNK = 1 << 16
NO_PROGRAM, NOT_STARTED = 127, ("bwrap: execvp ", "bwrap: Can't chdir to ")
"""Status of a program that a container lacks, as a shell reports it, and what bubblewrap then says."""
QUIET = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)]
PAGE = os.sysconf("SC_PAGE_SIZE")  # a file takes whole pages


def main() -> None:
    """Run the program that stdin describes and write its result to stdout. The process id of the rank is argv[1]."""
    rank = int(sys.argv[1])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.raise_oom_score(start.PROGRAM_SCORE - 1)
    linux.prctl(linux.PR_SET_THP_DISABLE, 1)  # inherited; otherwise 4 KB in use keep a whole huge page of 2 MB
    request = json.loads(sys.stdin.buffer.readline())
    files = {name: sys.stdin.buffer.read(size) for name, size in request["files"].items()}
    stdin = sys.stdin.buffer.read(request["stdin"])
    folder = "" if request["bubblewrap"] else _make_folder()
    try:
        answer, outputs = _run(request, files, stdin, folder, rank)
    except SandboxError as error:
        answer, outputs = {"error": str(error)}, []
    finally:
        end_all()
        cgroup.remove()
        if folder:
            _remove(folder)
    sys.stdout.buffer.write(json.dumps({**answer, "outputs": [len(output) for output in outputs]}).encode() + b"\n")
    sys.stdout.buffer.write(b"".join(outputs))


def _run(request: dict, files: dict[str, bytes], stdin: bytes, folder: str, rank: int) -> tuple[dict, list[bytes]]:
    """Run the program, and return (answer for the rank, [stdout, stderr] of the program). folder: "" with isolation."""
    limits, pipes = ResourceLimits(**request["limits"]), request["pipes"]
    if sum(-(-len(content) // PAGE) * PAGE for content in files.values()) > limits.scratch_bytes:
        return {"status": -signal.SIGKILL, "ended_by": "memory", "seconds": 0.0}, [b"", b""]
    outputs: dict[int, bytearray] = {}
    container = request["container"]
    if pipes and container is None:
        stdio = (*pipes, os.open(os.devnull, os.O_WRONLY))
    elif pipes:
        err, err_writer = os.pipe()
        stdio, outputs = (*pipes, err_writer), {err: bytearray()}
    else:
        (out, out_writer), (err, err_writer) = os.pipe(), os.pipe()
        stdio, outputs = (start.sealed_file("stdin", stdin), out_writer, err_writer), {out: bytearray(), err: bytearray()}
    for reader in outputs:
        os.set_blocking(reader, False)
    for descriptor in stdio:
        os.set_inheritable(descriptor, False)
    try:
        if folder:
            started = start.start_free(request["argv"], files, stdio, limits, request["environment"], folder)
        else:
            rules = bytes.fromhex(request["filter"])
            started = start.start_isolated(request["bubblewrap"], rules, request["argv"], files, stdio, limits, container)
        for descriptor in stdio:
            os.close(descriptor)
        watch = _Watch(started, limits, outputs, rank, bool(pipes), container)
        begun = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # bubblewrap has failed, which `wait` notices
            os.write(started.go, b"1")
        status, cause = watch.wait()
        seconds = time.monotonic() - begun
    except SandboxError as error:
        _drain(outputs, limits.output_bytes)
        last_line = b"".join(outputs.values()).decode(errors="replace").strip().splitlines()[-1:]
        if container is not None and "".join(last_line).startswith(NOT_STARTED):  # an earlier program may have removed it
            return {"status": NO_PROGRAM, "ended_by": "exit", "seconds": 0.0}, [
                b"",
                last_line[0].removeprefix("bwrap: ").encode(),
            ]
        raise SandboxError(": ".join([str(error), *last_line])) from None
    end_all()
    if cgroup.ran_out_of_memory():
        status, cause = -signal.SIGKILL, "memory"
    _drain(outputs, limits.output_bytes)
    written = [bytes(output) for output in outputs.values()]
    if sum(map(len, written)) > limits.output_bytes:
        written = [
            written[0][: limits.output_bytes],
            *(more[: max(0, limits.output_bytes - len(written[0]))] for more in written[1:]),
        ]
        cause = "output" if cause == "exit" else cause
    return {"status": status, "ended_by": cause, "seconds": seconds}, written


def _drain(outputs: dict[int, bytearray], most: int) -> None:
    """Read the rest of each output, up to somewhat more than `most` bytes. All of the program's processes have ended."""
    for descriptor, output in outputs.items():
        with contextlib.suppress(BlockingIOError):  # without isolation an outside process may still hold the other end
            while len(output) <= most and (chunk := os.read(descriptor, CHUNK)):
                output += chunk


def end_all() -> None:
    """Kill all children and wait until they have ended. Repeat it for the orphans that become children, until none is left.

    The client bounds this wait: it kills a guard that does not answer within GUARD_TIMEOUT_S of the program's time.
    """
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


def _make_folder() -> str:
    import tempfile  # slow to import, and only needed without isolation

    return tempfile.mkdtemp(prefix="sandbox-")


def _remove(folder: str) -> None:
    """Remove a program's folder, which may be gone, deeply nested or unreadable to its owner. Its processes have ended."""
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        os.waitpid(os.posix_spawnp(command[0], command, os.environ, file_actions=QUIET), 0)


class _Watch:
    """Waits for the end of a program and enforces its limits. outputs: descriptor -> bytes read, which this class fills."""

    def __init__(
        self,
        started: StartedProgram,
        limits: ResourceLimits,
        outputs: dict[int, bytearray],
        rank: int,
        interactive: bool,
        container: int | None = None,
    ) -> None:
        """container: the process that keeps the program's root, where the kernel bounds the number of files."""
        self._bounded = container is not None
        self._started, self._limits, self._outputs, self._rank = started, limits, outputs, rank
        self._control, self._closed = sys.stdin.fileno() if interactive else container, False
        self._interactive = interactive
        self._ends, ends_writer = os.pipe()  # gets a byte when a child ends
        os.set_blocking(ends_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ends_writer, warn_on_full_buffer=False)
        self._poll = select.poll()
        for descriptor in (*outputs, self._ends, *([] if self._control is None else [self._control])):
            self._poll.register(descriptor, select.POLLIN)
        self._meter, self._used = processes.UsageMeter(started.root), processes.ResourceUsage(0, 0, 0.0)
        self._tick_s = TICK_S

    def wait(self) -> tuple[int, str]:
        """Return (exit status, cause of the end); the status is -SIGKILL if the caller must end the program."""
        next_sample = begun = time.monotonic()
        while True:
            for descriptor, _ in self._poll.poll(1e3 * max(0.0, next_sample - time.monotonic())):
                try:
                    ended = descriptor == self._control and not self._interactive  # a process
                    chunk = b"" if ended else os.read(descriptor, CHUNK)
                except BlockingIOError:
                    continue  # the program read its own output
                if descriptor in self._outputs:
                    self._outputs[descriptor] += chunk
                if not chunk:
                    self._poll.unregister(descriptor)
                    if descriptor == self._control:
                        self._closed = True
                        self._started.kill()
                elif descriptor == self._control:
                    next_sample, self._tick_s = time.monotonic(), TICK_S / 2  # still idle; the next sample doubles it
            if (status := self._started.exit_status(self._closed)) is not None:
                return status, self._cause(status)
            if sum(map(len, self._outputs.values())) > self._limits.output_bytes:
                return -signal.SIGKILL, "output"
            if (now := time.monotonic()) >= next_sample:
                if cause := self._check_limits(now - begun):
                    return -signal.SIGKILL, cause
                next_sample = now + self._tick_s

    def _cause(self, status: int) -> str:
        if status >= 0:
            return "exit"
        if self._closed and status == -signal.SIGKILL:
            return "closed"
        beyond = status == -signal.SIGKILL and self._used.cpu_s > self._limits.cpu_s - 2 * TICK_S
        return "cpu time" if status == -signal.SIGXCPU or beyond else f"signal {-status}"

    def _check_limits(self, seconds: float) -> str | None:
        """Sample the usage, set the next sampling interval, and return an exceeded limit or None. seconds: wall time so far."""
        limits = self._limits
        if os.getppid() != self._rank:
            raise SandboxError("the rank has ended")
        if seconds > limits.wall_s:
            return "wall time"
        used = self._meter.sample()
        used = replace(used, cpu_s=max(used.cpu_s, cgroup.cpu_s()))
        idle = self._interactive and used == self._used
        self._used, self._tick_s = used, min(2 * self._tick_s, IDLE_TICK_S) if idle else TICK_S
        if used.processes > limits.processes:
            return "processes"
        if used.memory_bytes > limits.memory_bytes:
            return "memory"
        if used.cpu_s > limits.cpu_s:
            return "cpu time"
        return "memory" if not self._bounded and self._files() > limits.scratch_files else None

    def _files(self) -> int:
        """Return the number of files in bubblewrap's scratch folder; 0 until that is there, and without isolation."""
        try:
            scratch = os.statvfs(f"/proc/{self._started.root}/root{SCRATCH}")
        except OSError:
            return 0
        size = scratch.f_blocks * scratch.f_frsize
        built = self._started.report is not None and size < self._limits.scratch_bytes + (1 << 16)  # else the machine's /tmp
        return scratch.f_files - scratch.f_ffree if built else 0
