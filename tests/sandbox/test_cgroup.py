"""Which cgroups count as delegated and, where one is, what it limits."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.sandbox import cgroup, guard_client
from tests.sandbox.hosts import Host

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 30 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
IN_A_CONTAINER = "32 30 0:28 /docker/1f /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
SOCKETS = """
import socket
for number in range(8):
    if number and os.fork() == 0:
        break
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
except OSError:
    pass
for end in (end for pair in pairs for end in pair):
    end.setblocking(False)
    try:
        while True:
            end.send(bytes(1 << 16))
    except BlockingIOError:
        pass
time.sleep(10)
"""
SHORT_LIVED = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so the kernel adds the time of those that end to nobody's
for _ in range(200):
    if os.fork() == 0:
        while time.process_time() < 0.006: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""
WITHOUT_MEMORY = """
from pathlib import Path
from pipeline.sandbox import cgroup
cgroup.delegated_folder = lambda: Path({folder!r})
cgroup.LIMIT_FILES, cgroup.EVENT_FILES = ("cgroup.max.descendants",), ("cgroup.events",)
"""
"""A guard that takes a cgroup of version 2 whose memory is that of version 1: other files, with other limits, are there."""


@pytest.mark.parametrize(
    ("cgroups", "mounts", "expected"),
    [
        ("0::/user.slice/a.scope\n", V2, (2, Path("/sys/fs/cgroup/user.slice/a.scope"))),
        ("0::/\n", V2, (2, Path("/sys/fs/cgroup"))),
        ("4:memory:/job_7\n3:cpu,cpuacct:/x\n0::/\n", V1, (1, Path("/sys/fs/cgroup/memory/job_7"))),
        ("4:memory:/docker/1f/a\n", IN_A_CONTAINER, (1, Path("/sys/fs/cgroup/memory/a"))),
        ("4:memory:/docker/1f0\n", IN_A_CONTAINER, (0, Path("/"))),  # another's, which is not mounted
        ("3:cpu,cpuacct:/x\n", V1, (0, Path("/"))),
        ("", "", (0, Path("/"))),
    ],
)
def test_the_cgroup_of_a_process(cgroups: str, mounts: str, expected: tuple[int, Path]):
    assert cgroup.memory_cgroup(cgroups, mounts) == expected


def test_only_delegated_cgroups_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One's own folder in one's own folder, which is every folder for root, is not delegated; one below another user's is."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/cgroup.procs").touch()
    monkeypatch.setattr(cgroup, "_own", lambda: (1, tmp_path / "a"))
    assert _place() is None and not cgroup.prepare()
    above = (tmp_path.stat().st_uid, 1 + tmp_path.stat().st_uid)
    seen = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: Owned(seen(path, **how), above[path == tmp_path]))
    assert _place() == tmp_path / "a" and cgroup.prepare()
    cgroup.delegated_folder.cache_clear()


def _place() -> Path | None:
    cgroup.delegated_folder.cache_clear()
    return cgroup.delegated_folder()


class Owned:
    def __init__(self, found, owner: int) -> None:
        self.st_uid = owner


def test_kernel_memory_is_limited(host: Host):
    """Without a delegated cgroup the limits on open files and processes bound it: tests/sandbox/test_hostile_kernel.py."""
    if host.place != "here" or not cgroup.prepare():
        pytest.skip(cgroup.NO_CGROUP)
    ran = host.run(SOCKETS, open_files=500, memory_bytes=128 << 20, wall_s=30.0, cpu_s=20.0)
    assert (ran.status, ran.ended_by) == (-9, "memory")
    assert host.run("x = bytearray(b'x') * (100 << 20)").status == 0
    assert not list(cgroup.delegated_folder().glob(f"{cgroup.PROGRAM_PREFIX}*"))


@pytest.fixture
def version_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give programs a cgroup of version 2: a delegated one or, as root, one made here."""
    if cgroup.prepare() and (cgroup.delegated_folder() / "cgroup.controllers").exists():
        yield
        return
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    mounted = [Path(folder) for _, folder, kind, *_ in lines if kind == "cgroup2"]
    if not mounted:
        pytest.skip("no cgroups of version 2 are mounted")
    made = mounted[0] / f"hetstep-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 2 can be made: {error}")
    monkeypatch.setattr(
        guard_client,
        "MAIN",
        guard_client.MAIN.replace("guard.main()", f"exec({WITHOUT_MEMORY.format(folder=str(made))!r}); guard.main()"),
    )
    yield
    made.rmdir()


def test_cpu_time_of_processes_that_the_guard_does_not_see(version_2: None, host: Host):
    if host.place != "here":
        pytest.skip("it takes another user's cgroups")
    ran = host.run(SHORT_LIVED, wall_s=20.0, cpu_s=0.4)
    assert (ran.status, ran.ended_by) == (-9, "cpu time")
