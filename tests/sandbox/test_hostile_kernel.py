"""Programs that use memory that no process's size includes, or resources that all programs of a user share."""

import resource

import pytest

from tests.sandbox.hosts import Host

SHMEM = """
def shared_mb():
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return int(lines["Shmem"].split()[0]) >> 10
"""


def test_buffers_of_sockets(host: Host):
    ran = host.held("""
import socket
pairs, sent = [], 0
try:
    while True:
        pairs.append(socket.socketpair())
except OSError:
    pass
for end in (end for pair in pairs for end in pair):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):  # 32 and 33: SO_SNDBUFFORCE, SO_RCVBUFFORCE
        refused(end.setsockopt, socket.SOL_SOCKET, option, 64 << 20)
    end.setblocking(False)
    try:
        while sent < 64 << 20:
            sent += end.send(bytes(1 << 16))
    except BlockingIOError:
        pass
print(sent)
""")
    assert 0 < int(ran.stdout.split()[0]) < 8 << 20


def test_shared_memory_that_is_no_longer_mapped(host: Host):
    """Memory without a file stays while one of its pages is mapped, and no process's size includes the others."""
    host.held(
        SHMEM
        + """
import mmap
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
before, size = shared_mb(), 16 << 20
try:
    zero = os.open("/dev/zero", os.O_RDWR)
except OSError:
    zero = -1
for flags, descriptor in ((0x21, -1), (0x23, -1), (0x1, zero)):  # MAP_ANONYMOUS with MAP_SHARED and MAP_SHARED_VALIDATE; a file
    for _ in range(8):
        place = libc.mmap(None, size, 3, flags, descriptor, 0)
        if place != ctypes.c_void_p(-1).value:
            ctypes.memset(place, 1, size)
            libc.munmap(place + 4096, size - 4096)
shared_mb() - before < 100 or escaped(shared_mb() - before, "MB")
""",
        wall_s=30.0,
        cpu_s=10.0,
    )


def test_huge_pages_held_by_pipes(host: Host):
    """One byte of a huge page in a pipe holds all of its 2 MB."""
    host.held("""
class Piece(ctypes.Structure):
    _fields_ = (("place", ctypes.c_void_p), ("size", ctypes.c_size_t))
page = ctypes.create_string_buffer(4096)
reader, writer = os.pipe()
libc.vmsplice(writer, ctypes.byref(Piece(ctypes.addressof(page), 1)), 1, 0) == -1 or escaped("vmsplice")
refused(os.splice, os.open(__file__, os.O_RDONLY), writer, 1)
refused(os.sendfile, writer, os.open(__file__, os.O_RDONLY), 0, 1)
""")


def test_huge_pages_that_are_mostly_unmapped(host: Host):
    """The kernel splits one and frees its parts only when it is short of memory."""
    host.held("""
import mmap
def resident():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) << 10
room = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
room.madvise(mmap.MADV_HUGEPAGE)
before = resident()
room[8 << 20] = 1
resident() - before < 1 << 20 or escaped(resident() - before)
libc.prctl(41, 0, 0, 0, 0) == -1 or escaped("PR_SET_THP_DISABLE")
""")


def test_huge_pages_that_are_reserved(host: Host):
    host.held("""
import mmap
try:
    mmap.mmap(-1, 2 << 20, 0x22 | 0x40000)  # MAP_HUGETLB
    escaped("MAP_HUGETLB")
except OSError as error:
    error.errno == errno.EPERM or escaped(error)  # and not for want of them
""")


def test_locks_on_parts_of_files(host: Host):
    """No limit bounds their number. The calls appear to succeed, but no lock is held."""
    host.held("""
import fcntl, sqlite3
held = open("held", "w")
for number in range(1000):
    fcntl.lockf(held, fcntl.LOCK_EX, 1, 2 * number)
if os.fork() == 0:
    os._exit(libc.fcntl(held.fileno(), 6, b"\\1\\0\\0\\0" + bytes(28)) != 0)  # F_SETLK, F_WRLCK
os.wait()[1] == 0 or escaped("the kernel keeps them")
for command in (36, 37, 38, 1024, 1026):  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_NOTIFY
    refused(fcntl.fcntl, held, command, bytes(32))
fcntl.flock(held, fcntl.LOCK_EX)
with sqlite3.connect("a.db") as base:
    base.execute("create table t (x)")
    base.execute("insert into t values (1)")
    assert base.execute("select x from t").fetchall() == [(1,)]
""")


def test_descriptors_in_transit(host: Host):
    """Their limit is shared by a user's programs."""
    host.held("""
import socket
one, other = socket.socketpair()
refused(socket.send_fds, one, [b"x"], [0])
""")


def test_pending_signals_and_timers(host: Host):
    """Their limit is shared by a user's programs."""
    host.held("""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
value = ctypes.c_void_p()
count = sum(libc.sigqueue(os.getpid(), signal.SIGRTMIN, value) == 0 for _ in range(10_000))
timers = sum(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 for _ in range(10_000))
count + timers <= 64 or escaped(count, timers)
""")


def test_limits_that_a_program_inherits(host: Host):
    """The core limit is 1 byte: with 0 the kernel starts a handler of cores, with 1 it does not (core(5))."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 and host.place == "here":
        pytest.skip("this user may have no core, and cannot ask for 1 byte of one")
    host.held("""
import resource
for name, most in (("CORE", 1), ("RTPRIO", 0), ("NICE", 0), ("SIGPENDING", 64), ("MSGQUEUE", 0), ("MEMLOCK", 1 << 16)):
    found = resource.getrlimit(getattr(resource, "RLIMIT_" + name))
    found == (most, most) or escaped(name, found)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
refused(os.nice, -1)
""")


def test_a_visible_socket_outside(host: Host):
    """A socket's file accepts a datagram wherever it is visible, even read-only."""
    with host.shown() as (folder, outside):
        host.held(
            f"""
import socket
there = {folder!r} + "/outside"
os.path.exists(there) or escaped("the test shows nothing")
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
    refused(socket.socketpair, socket.AF_UNIX, kind)
    for work in ("connect", "bind", "sendto"):
        try:
            end, _ = socket.socketpair(socket.AF_UNIX, kind)
            end.sendto(b"x", there) if work == "sendto" else getattr(end, work)(there if work == "connect" else "mine")
            escaped(kind, work)
        except OSError:
            pass
end, other = socket.socketpair()
for work in (end.connect, end.bind):
    refused(work, there)
refused(end.listen)
refused(end.send, b"x", socket.MSG_OOB)
end.send(b"x")
assert other.recv(1) == b"x"
""",
            readable=(folder,),
        )
        with pytest.raises(BlockingIOError):
            outside.recv(1)
