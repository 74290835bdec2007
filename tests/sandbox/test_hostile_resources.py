"""Programs that exhaust resources. Each test is one program; `Host.run` asserts that nothing of it is left.

Uncontained, each ends by itself before the machine is full: after some hundred processes or MB, or some seconds.
"""

import os

import pytest

from tests.sandbox.hosts import LIMITS, Host


def test_fork_bomb(host: Host):
    ran = host.run("""
reader, writer = os.pipe()
os.write(writer, b"x" * 500)
os.close(writer)
while os.read(reader, 1):  # by all of them together
    try:
        os.fork()
    except OSError:
        pass
time.sleep(10)
""")
    assert (ran.status, ran.ended_by) == (-9, "processes")


def test_process_names_that_imitate_usage_fields(host: Host):
    """For zombies, the kernel reports nothing else about their memory."""
    host.held("""
for name in (b"x\\rVmSwap:y", b"x\\x0bVmSwap:y", b"x\\nVmSwap:y", b"x:VmSwap:y"):
    if os.fork() == 0:
        libc.prctl(15, name)  # PR_SET_NAME
        os._exit(0)
time.sleep(0.3)  # while the guard looks
""")


@pytest.mark.full
def test_fork_churn(host: Host):
    """Processes end while the guard inspects them. The guard reports the limit that ended the program."""
    ran = host.run(
        """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so they are gone at once
for _ in range(3):
    os.fork()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        os.fork() or os._exit(0)
    except OSError:
        pass
""",
        wall_s=20.0,
        cpu_s=30.0,
        memory_bytes=1 << 30,
        processes=200,
    )
    assert ran.ended_by in ("exit", "processes", "memory"), ran


@pytest.mark.long
def test_bomb_of_threads(host: Host):
    ran = host.run("""
import threading
for _ in range(500):
    try:
        threading.Thread(target=time.sleep, args=(10,)).start()
    except RuntimeError:
        pass
""")
    assert ran.ended_by == "processes"


def test_memory_of_one_process(host: Host):
    ran = host.run("""
hoard = []
for _ in range(128):
    hoard.append(bytearray(b"x") * (4 << 20))
""")
    assert ran.ended_by == "memory" or (ran.status == 1 and b"MemoryError" in ran.stderr)


def test_shared_memory(host: Host):
    """It is shared through a file, since other shared memory is refused: test_hostile_kernel.py."""
    ran = host.run(
        """
import mmap
os.truncate(os.open("hoard", os.O_RDWR | os.O_CREAT), 512 << 20)
hoard = mmap.mmap(os.open("hoard", os.O_RDWR), 512 << 20)
while True:
    hoard.write(b"x" * (1 << 20))
""",
        wall_s=20.0,
        cpu_s=20.0,
        scratch_bytes=512 << 20,
    )
    assert ran.ended_by == "memory"


def test_memory_that_no_process_reports(host: Host):
    host.held("""
refused(os.memfd_create, "hoard")
for number in {"x86_64": (29, 68, 240, 447), "aarch64": (194, 186, 180, 447)}[os.uname().machine]:  # shmget, msgget, mq_open
    if libc.syscall(number, 0, 1 << 20, 0o1600, 0) != -1:
        escaped("call", number)
refused(open, "/dev/shm/hoard", "w")
refused(open, "/dev/mqueue/hoard", "w")
""")


def test_disk_fill(host: Host):
    ran = host.held("""
written = 0
for name in range(50):
    try:
        with open(str(name), "wb") as file:
            for _ in range(100):
                written += file.write(b"x" * (1 << 16))
    except OSError as error:
        pass
print(written)
""")
    assert int(ran.stdout.split()[0]) <= LIMITS.scratch_bytes + 50 * 2 * 8192


def test_sparse_huge_file(host: Host):
    host.held("""
file = open("sparse", "wb")
refused(os.truncate, "sparse", 1 << 40)
refused(os.pwrite, file.fileno(), b"x", 1 << 40)
refused(os.posix_fallocate, file.fileno(), 0, 1 << 30)
""")


def test_inode_flood(host: Host):
    ran = host.run(
        """
for name in range(20_000):
    os.mkdir(str(name))
time.sleep(20)
""",
        wall_s=20.0,
        cpu_s=20.0,
    )
    assert ran.ended_by == "memory" or (ran.status == 1 and b"No space left" in ran.stderr)


def test_huge_output(host: Host):
    ran = host.run("""
for _ in range(2000):
    os.write(1, b"x" * (1 << 16))
""")
    assert (ran.ended_by, len(ran.stdout)) == ("output", LIMITS.output_bytes)


def test_output_of_a_process_that_has_ended(host: Host):
    ran = host.run("os.write(1, b'x' * 40000); os.write(2, b'y' * 40000)")
    assert (ran.ended_by, len(ran.stdout), len(ran.stderr)) == ("output", 40000, LIMITS.output_bytes - 40000)


def test_sleep_forever(host: Host):
    ran = host.run("time.sleep(60)", wall_s=0.5)
    assert (ran.status, ran.ended_by) == (-9, "wall time") and ran.seconds >= 0.5


@pytest.mark.long
def test_stops_itself(host: Host):
    assert host.run("os.kill(os.getpid(), signal.SIGSTOP)", wall_s=0.5).ended_by == "wall time"


@pytest.mark.long
def test_ignores_every_signal(host: Host):
    ran = host.run(
        """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
time.sleep(60)
""",
        wall_s=1.0,
    )
    assert ran.ended_by == "wall time"


@pytest.mark.full
def test_busy_processes_that_ignore_the_kernels_limit(host: Host):
    ran = host.run(
        """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
for _ in range(3):
    os.fork()
while time.process_time() < 60: pass
""",
        wall_s=60.0,
        cpu_s=0.5,
    )
    assert (ran.status, ran.ended_by) == (-9, "cpu time")


IGNORES_ENDS = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so the kernel adds the time of those that end to nobody's
for _ in range(16):
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


def test_busy_processes_that_are_not_waited_for(host: Host):
    ran = host.run(IGNORES_ENDS, wall_s=60.0, cpu_s=0.5)
    assert (ran.status, ran.ended_by) == (-9, "cpu time")


@pytest.mark.full
def test_busy_processes_that_are_waited_for_after_others_that_are_not(host: Host):
    """The later ones' time does not replace that of the earlier ones."""
    ran = host.run(
        """
def work(processes, seconds):
    for _ in range(processes):
        if os.fork() == 0:
            while time.process_time() < seconds: pass
            os._exit(0)
        try:
            os.wait()
        except ChildProcessError:
            pass
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
work(4, 0.1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
work(60, 0.007)  # between two looks
""",
        wall_s=60.0,
        cpu_s=0.6,
    )
    assert (ran.status, ran.ended_by) == (-9, "cpu time")


def test_busy_orphans(free: Host):
    """Without a namespace there is no process 1 that adopts them."""
    ran = free.run(
        """
for _ in range(2):
    if os.fork() == 0:
        os.fork() and os._exit(0)
        while time.process_time() < 60: pass
os.wait()
time.sleep(60)
""",
        wall_s=60.0,
        cpu_s=0.5,
    )
    assert (ran.status, ran.ended_by) == (-9, "cpu time")


def test_busy_processes_that_are_waited_for_count_once(host: Host):
    host.held(
        """
for _ in range(12):
    if os.fork() == 0:
        if os.fork() == 0:
            while time.process_time() < 0.03: pass
            os._exit(0)
        os.wait()
        while time.process_time() < 0.02: pass
        os._exit(0)
    os.wait()
""",
        wall_s=20.0,
    )


def test_files_that_do_not_fit(host: Host):
    """An answer may be of any length."""
    ran = host.run("#" * LIMITS.scratch_bytes)
    assert (ran.status, ran.ended_by) == (-9, "memory")


@pytest.mark.parametrize("free", ["here", "as a user"], indirect=True)  # root can open closed folders
@pytest.mark.parametrize(
    "left",
    [
        "os.mkdir('shut'); open('shut/file', 'w').close(); os.chmod('shut', 0)",
        pytest.param("for _ in range(1100): os.mkdir('x'); os.chdir('x')", marks=pytest.mark.full),
        "os.chdir('/'); os.rename(os.environ['HOME'], os.environ['HOME'] + '-moved'); os.rmdir(os.environ['HOME'] + '-moved')",
        "os.chmod('.', 0)",
    ],
    ids=["shut", "deep", "gone", "all shut"],
)
def test_leaves_a_folder_that_is_hard_to_remove(free: Host, left: str):
    ran = free.run(f"print(os.getcwd(), flush=True)\nos.remove('program.py')\n{left}", wall_s=20.0, cpu_s=10.0)
    assert (ran.status, ran.ended_by) == (0, "exit"), ran
    assert not os.path.lexists(ran.stdout.decode().strip())


def test_ends_by_a_signal(host: Host):
    ran = host.run("os.kill(os.getpid(), signal.SIGSEGV)")
    assert (ran.status, ran.ended_by) == (-11, "signal 11")
