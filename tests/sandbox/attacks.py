"""Run attacks against the sandbox from several places and write the table in pipeline/sandbox/ATTACKS.md.

    python -m tests.sandbox.attacks                 writes the table anew (as root)
    python -m tests.sandbox.attacks in_image        only prints what programs in images reach

Each attempt is harmless without a sandbox. `test_attacks.py` compares the page with its results.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from pipeline.sandbox.limits import ProgramResult
from tests.sandbox import container_attacks
from tests.sandbox.hosts import LIMITS, PLACES, Host

PAGE = Path(__file__).parents[2] / "pipeline/sandbox/ATTACKS.md"
BEGIN, END = "<!-- python -m tests.sandbox.attacks writes from here -->\n", "<!-- to here -->\n"
IN_IMAGE = ("in an image, as a user", "in an image, as root")
COLUMNS = ("as a user", "as root", "in a container", *IN_IMAGE, "without isolation")
HELD, THROUGH, NOT_TRIED = "held", "**passes**", ""

REACHES = {  # attack: a program that prints ESCAPED if it succeeds
    "read another file of the user": 'refused(open, told["folder"] + "/secret")',
    "write outside of the scratch folder": 'refused(os.utime, told["folder"] + "/secret")',
    "open a connection to this machine": """
import socket
refused(lambda: socket.socket(socket.AF_INET).connect(("127.0.0.1", told["port"])))""",
    "reach a Unix socket of another process": """
import socket
refused(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + told["abstract"]))""",
    "send a datagram to a socket in a `readable` folder": """
import socket
refused(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", told["folder"] + "/shown/outside"))""",
    "see or signal other processes": 'refused(os.kill, told["pid"], 0)',
    "read another process's environment": "refused(open, f\"/proc/{told['pid']}/environ\")",
    "read a token from its own environment": 'any("TOKEN" in name for name in os.environ) and escaped()',
    "change the limits of the process that waits for it": """
import resource
refused(resource.prlimit, os.getppid(), resource.RLIMIT_CPU)""",
    "trace a process": "libc.ptrace(0, 0, 0, 0) == -1 or escaped()",
    "make namespaces": "libc.unshare(0x10000000) == -1 or escaped()",
    "gain rights by a set-user-id program": """
"NoNewPrivs:\\t1" in open("/proc/self/status").read() or escaped()""",
    "use io_uring, bpf or keys": """
for number in (425, {"x86_64": 250, "aarch64": 219}[os.uname().machine]):
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) or escaped(number)""",
    "raise the size of socket buffers": """
import socket
refused(socket.socketpair()[0].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)""",
    "keep shared memory that nothing maps, or whole pages in pipes": """
import mmap
refused(mmap.mmap, -1, 4096)
reader, writer = os.pipe()
refused(os.splice, os.open(__file__, os.O_RDONLY), writer, 1)""",
    "have the kernel keep locks without number": """
import fcntl
held = open("held", "w")
fcntl.lockf(held, fcntl.LOCK_EX)
if os.fork() == 0:
    os._exit(libc.fcntl(held.fileno(), 6, b"\\1\\0\\0\\0" + bytes(28)) != 0)
os.wait()[1] == 0 or escaped()""",
    "use up what the user's programs share: large pipes, watches, signals": """
import fcntl, resource
refused(fcntl.fcntl, os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 17)
libc.inotify_init1(0) == -1 or escaped()
resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] <= 64 or escaped()""",
    "have the machine's core handler started": """
import resource
resource.getrlimit(resource.RLIMIT_CORE) == (1, 1) or escaped()""",
}
REFUSED_IN_CONTAINERS = {
    "trace a process",
    "make namespaces",
    "gain rights by a set-user-id program",
    "use io_uring, bpf or keys",
}
"""Attacks that a container around the tests may block although the sandbox does not."""
USES = {  # attack: (program, what ends it)
    "use more CPU time": ("while time.process_time() < 60: pass", "cpu time", {"cpu_s": 0.3, "wall_s": 20.0}),
    "use more wall time": ("time.sleep(60)", "wall time", {"wall_s": 0.5}),
    "use more memory, in several processes": (
        """
for _ in range(5):
    if os.fork() == 0:
        hoard = bytearray(b"x") * (40 << 20)
        time.sleep(30)
time.sleep(30)""",
        "memory",
        {"wall_s": 20.0, "cpu_s": 20.0},
    ),
    "start more processes": (
        "for _ in range(20):\n    os.fork() or time.sleep(9)\ntime.sleep(9)",
        "processes",
        {"wall_s": 9.0},
    ),
    "write more output": ("while True: os.write(1, bytes(1 << 16))", "output", {}),
    "open more files": (
        "hoard = []\ntry:\n    while len(hoard) < 99: hoard.append(os.pipe())\nexcept OSError: sys.exit(7)",
        7,
        {},
    ),
    "fill more of the disk": (
        "try:\n    for name in range(4): open(str(name), 'wb').write(bytes(3 << 20))\nexcept OSError: sys.exit(7)",
        7,
        {},
    ),
    "leave a process behind": ("if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)", None, {}),
}
REACH = """
attempts = {attempts!r}
for attempt, program in attempts.items():
    if os.fork() == 0:
        try:
            def escaped(*how):
                os._exit(1)
            exec(program)
            os._exit(0)
        except BaseException as error:
            print(attempt, repr(error), file=sys.stderr, flush=True)
            os._exit(2)
    print(os.waitstatus_to_exitcode(os.wait()[1]), attempt, flush=True)
"""


def host_of(column: str) -> Host:
    place = next((place for place in PLACES if column.endswith(place)), "here")
    return Host(place, "none" if column == COLUMNS[-1] else "auto", column in IN_IMAGE)


def found(host: Host) -> dict[str, str]:
    """Return attack -> its result."""
    with host.shown() as (folder, _):
        ran = host.tried(REACH.format(attempts=REACHES), "tried", replace(LIMITS, wall_s=20.0, cpu_s=10.0), (folder,))
    told = dict(line.split(" ", 1)[::-1] for line in ran.stdout.decode().splitlines())
    assert list(told) == list(REACHES) and set(told.values()) <= {"0", "1"}, ran
    cells = {attempt: THROUGH if code == "1" else HELD for attempt, code in told.items()}
    for attempt, (program, ended_by, limits) in USES.items():
        ran = host.tried(program, "tried", replace(LIMITS, **limits))
        cells[attempt] = HELD if _held(ran, ended_by) else THROUGH
    if host.in_image:
        cells |= {attempt: HELD if held else THROUGH for attempt, held in host.container_attacks().items()}
    return cells


def _held(ran: ProgramResult, ended_by: str | int | None) -> bool:
    if ended_by is None:
        return not any(_cmdline(pid) == b"tried" for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid())
    return ended_by in ((ran.status,) if isinstance(ended_by, int) else (ran.ended_by,))


def _cmdline(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2]
    except (OSError, IndexError):
        return b""


def table(columns: dict[str, dict[str, str]]) -> str:
    """columns: column -> attack -> result."""
    lines = [f"| a program tries to | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    rows = (*REACHES, *USES, *container_attacks.ATTACKS)
    lines += [f"| {row} | {' | '.join(cells.get(row, NOT_TRIED) for cells in columns.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def on_the_page() -> dict[str, dict[str, str]]:
    """Return the page's table: column -> attack -> result."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {column: {row[0]: row[at] for row in rows if row[at] != NOT_TRIED} for at, column in enumerate(head) if at}


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("expected to run as root")
    columns = {}
    for column in IN_IMAGE if sys.argv[1:] == ["in_image"] else COLUMNS:
        host = host_of(column)
        try:
            columns[column] = found(host)
        finally:
            host.close()
    if len(columns) < len(COLUMNS):
        print(table(columns))
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(columns) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
