"""Run programs of random system calls and allocations in the sandbox: none breaks it, outlives it or changes the machine.

A program depends on its seed alone. `Host.run` asserts that the
answer comes in time, that no process or file is left, and that the canary's folder is unchanged. The machine is checked after
each program too. Nothing runs uncontained.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.sandbox.limits import SandboxError
from tests.sandbox.hosts import Host

ENDS = ("exit", "wall time", "cpu time", "memory", "output", "processes")
SETTINGS = ("core_pattern", "hostname", "domainname", "printk", "tainted", "pid_max", "randomize_va_space")
MOUNTED = "nr_inodes="  # of a scratch folder
CLOCK_S = 5.0  # seconds by which the clock may differ from the monotonic one, which includes time servers' corrections

PROGRAM = """
import mmap, random, socket, threading
draw = random.Random({seed})
room = ctypes.create_string_buffer(1 << 16)
libc.syscall.restype = ctypes.c_long
kept = []

def argument():
    kind = draw.random()
    if kind < 0.35:
        return draw.randrange(0, 20)
    if kind < 0.5:
        return ctypes.addressof(room) + 8 * draw.randrange(1 << 12)
    if kind < 0.65:
        return 1 << draw.randrange(64)
    if kind < 0.8:
        return draw.choice((-1, -2, -100, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, 4096, 0x21, 0x22, 0x1000000))
    return draw.getrandbits(draw.choice((8, 16, 32, 64)))

def random_calls(count):
    if draw.random() < 0.5:
        room.raw = draw.randbytes(len(room))
    for _ in range(count):
        number = draw.choice((draw.randrange(470), draw.randrange(470), draw.choice(({numbers})), draw.getrandbits(32)))
        libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument()) for _ in range(6)))

def signals():
    if draw.random() < 0.5:
        for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}}:
            signal.signal(number, signal.SIG_IGN)
    for _ in range(draw.randrange(40)):
        os.kill(1, draw.randrange(1, 65))
    os.kill(draw.choice((os.getpid(), os.getppid(), 0, -1)), draw.randrange(1, 65))

def hoard():
    kind = draw.randrange(9)
    if kind == 0:
        kept.append(os.pipe())
        os.set_blocking(kept[-1][1], False)
        os.write(kept[-1][1], bytes(draw.randrange(1 << 17)))
    elif kind == 1:
        kept.append(socket.socketpair(socket.AF_UNIX, draw.choice((1, 2, 5))))
        for end in kept[-1]:
            end.setblocking(False)
            end.send(bytes(draw.randrange(1, 1 << 17)))
    elif kind == 2:
        size = 4096 * draw.randrange(1, 1 << 12)
        kept.append(mmap.mmap(-1, size, draw.choice((0x22, 0x21, 0x4022, 0x8022, 0x40022))))
        for at in range(0, size, 4096 * draw.randrange(1, 64)):
            kept[-1][at] = 1
    elif kind == 3:
        name = str(draw.randrange(300))
        with open(name, "wb") as file:
            file.seek(draw.choice((0, 1 << 12, 1 << 20, 1 << 40)))
            file.write(bytes(draw.randrange(1 << 18)))
    elif kind == 4:
        name = str(draw.randrange(300))
        make = draw.choice((os.mkdir, os.unlink, os.rmdir, os.symlink, os.link))
        make(name, name + "l") if make in (os.symlink, os.link) else make(name)
    elif kind == 5:
        thread = threading.Thread(target=time.sleep, args=(draw.random(),), daemon=True)
        thread.start()
    elif kind == 6:
        kept.append(bytearray(draw.randrange(1 << draw.randrange(10, 25))))
    elif kind == 7:
        import fcntl, select
        command, told = draw.choice((6, 7, 37, 1024, 1031, 0)), draw.choice((bytes(32), draw.randrange(1 << 21)))
        fcntl.fcntl(draw.randrange(3, 32), command, told)
        kept.append(select.epoll())
        kept[-1].register(draw.randrange(32), 1)
    else:
        os.write(draw.choice((1, 2)), draw.randbytes(draw.randrange(1 << 12)))

signal.setitimer(signal.ITIMER_REAL, 1.0)  # what blocks ends here
for _ in range(draw.randrange(1, 8)):
    if draw.random() < 0.4 and os.fork() == 0:
        signal.setitimer(signal.ITIMER_REAL, draw.random())
    try:
        kind = draw.random()
        if kind < 0.1:
            signals()
        elif kind < 0.6:
            random_calls(draw.randrange(200))
        else:
            for _ in range(draw.randrange(60)):
                hoard()
    except (OSError, ValueError, RuntimeError, MemoryError, OverflowError):
        pass
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    ended_by: str
    seconds: float
    bad: str  # faults; empty if there is none


def fuzz(host: Host, programs: int, seed: int) -> Iterator[Outcome]:
    """Raises ValueError for a host that contains nothing."""
    if host.backend == "none":
        raise ValueError("backend: got 'none'; expected one that contains programs")
    before = machine()
    for number in range(seed, seed + programs):
        begun, bad, ended_by = time.monotonic(), "", ""
        try:
            ended_by = host.run(program(number), wall_s=3.0, cpu_s=2.0).ended_by
            if ended_by not in ENDS and not ended_by.startswith("signal "):
                bad = f"ended by {ended_by}"
        except (SandboxError, AssertionError) as error:
            bad = f"{type(error).__name__}: {error}"
        if (now := machine()) != before:
            bad += f" the machine was {before}, and is {now}"
            before = now
        yield Outcome(number, ended_by, time.monotonic() - begun, bad)


def program(seed: int) -> str:
    """System calls that the filter inspects, and those with the widest effects, are more frequent than others."""
    numbers = "9, 16, 53, 56, 62, 72, 157, 200, 234, 247, 293, 302, 41, 44, 101, 161, 165, 272, 319, 425, 435"
    return PROGRAM.format(seed=seed, numbers=numbers)


def machine() -> dict[str, object]:
    """Return the machine's state that no program in the sandbox may change."""
    kernel = {name: Path(f"/proc/sys/kernel/{name}").read_text() for name in SETTINGS}
    return {
        **kernel,
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if MOUNTED in line],
        "clock": round((time.time() - time.monotonic()) / CLOCK_S),
        "nice": os.nice(0),
        "scheduler": os.sched_getscheduler(0),
        "processors": os.sched_getaffinity(0),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
