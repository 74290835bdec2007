"""The filter in an interpreter of classic BPF for both architectures, and in the kernel for this machine's."""

import ctypes
import ctypes.util
import platform
import struct

import pytest
from system_calls import syscalls

from pipeline.sandbox import seccomp
from pipeline.sandbox.limits import SandboxError
from pipeline.sandbox.seccomp import (
    ABSENT,
    ALLOW,
    ALLOWED,
    DENY,
    GRANTED,
    INVALID,
    KILL,
    MACHINES,
    NO_ATTRIBUTES,
    NO_OPTION,
    NOT_FOR_THIS,
    YOUNGEST,
)
from tests.sandbox.hosts import Host

NAMES = " ".join(ALLOWED.values()).split()
YOUNG = {"futex_waitv", "fchmodat2"}  # newer than some libraries


def numbers(machine: str) -> dict[str, int]:
    return syscalls().load_arch_table(MACHINES[machine][0])


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, in_container: bool = False) -> int:
    """Return the filter's result for a call, by the rules of classic BPF."""
    _, own = MACHINES[machine]
    data = struct.pack(
        "<iIQ6Q", number, own if architecture is None else architecture, 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = list(struct.iter_unpack("<HBBI", seccomp.filter_for(machine, in_container)))
    at = accumulator = 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == seccomp.RETURN:
            return constant
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            continue
        holds = {
            seccomp.EQUAL: accumulator == constant,
            seccomp.GREATER: accumulator > constant,
            seccomp.ANY_BIT: bool(accumulator & constant),
        }[code]
        at += if_true if holds else if_false


LOOKS = {  # call: (arguments, verdict)
    "clone": [
        ((17,), ALLOW),  # fork
        ((0x3D0F00,), ALLOW),  # a thread
        ((0x10000000 | 17,), DENY),  # a user namespace
        ((0x00020000,), DENY),
    ],
    "clone3": [((0, 0), ABSENT)],
    "ioctl": [
        ((0, 0x5401), ALLOW),
        ((0, 0x5413), ALLOW),  # the size of a terminal
        ((0, 0x5412), NOT_FOR_THIS),  # TIOCSTI
        ((0, 1 << 32 | 0x541C), NOT_FOR_THIS),  # TIOCLINUX, past 32 bits
        ((0, 0x40049409), NOT_FOR_THIS),  # FICLONE
    ],
    "prctl": [((15,), ALLOW), ((4,), INVALID), ((22,), INVALID), ((41,), INVALID)],
    "fcntl": [
        ((3, 2), ALLOW),
        ((3, 1030), ALLOW),
        ((3, 1031), INVALID),  # F_SETPIPE_SZ
        ((3, 1024), INVALID),  # F_SETLEASE
        ((3, 8), INVALID),  # F_SETOWN
        ((3, 38), INVALID),  # F_OFD_SETLKW
        ((3, 6), GRANTED),
        ((3, 7), GRANTED),
    ],
    "mmap": [
        ((0, 4096, 3, 0x22), ALLOW),
        ((0, 4096, 3, 0x1), ALLOW),  # of a file
        ((0, 4096, 3, 0x21), DENY),
        ((0, 4096, 3, 0x23), DENY),  # MAP_SHARED_VALIDATE
        ((0, 4096, 3, 0x40022), DENY),  # MAP_HUGETLB
        ((0, 4096, 3, 0x20022), ALLOW),  # MAP_STACK
    ],
    "prlimit64": [((0, 7), ALLOW), ((1, 7), DENY), ((1 << 32, 7), ALLOW)],  # the kernel reads its lower half alone
    "pipe2": [((0, 0x80000), ALLOW), ((0, 0x80), INVALID)],
    "socketpair": [
        ((1, 1), ALLOW),
        ((1, 0x80801), ALLOW),
        ((1, 2), DENY),
        ((1, 5), DENY),
        ((2, 1), DENY),
    ],
    "sendto": [((3, 0, 1, 0x4040), ALLOW), ((3, 0, 1, 1), DENY), ((3, 0, 1, 0x4000000), DENY)],  # MSG_OOB, MSG_ZEROCOPY
}


@pytest.mark.parametrize("machine", MACHINES)
def test_allowed_calls(machine: str):
    listed = {number for name, number in numbers(machine).items() if name in NAMES}
    inspected = {numbers(machine)[name] for name in LOOKS}
    for number in set(range(YOUNGEST + 1)) - inspected:
        assert verdict(machine, number) == (ALLOW if number in listed else DENY), number
    for number in (YOUNGEST + 1, 1 << 30, 1 << 30 | 1, 0x7FFFFFFF, 0xFFFFFFFF - (1 << 32)):
        assert verdict(machine, number) == ABSENT
    assert verdict(machine, 41, architecture=0x40000003) == KILL  # i386


def test_every_name_is_a_call_of_a_machine():
    assert set(NAMES) <= numbers("x86_64").keys() and len(set(NAMES)) == len(NAMES)
    assert {"openat", "execve", "futex", "rt_sigreturn"} <= set(NAMES) & numbers("aarch64").keys()
    assert not set(NAMES) & set(LOOKS)


@pytest.mark.parametrize("machine", MACHINES)
def test_inspected_arguments(machine: str):
    assert set(LOOKS) == set(seccomp._rules())
    for name, cases in LOOKS.items():
        for arguments, expected in cases:
            assert verdict(machine, numbers(machine)[name], *arguments) == expected, (name, arguments)


IN_CONTAINERS = {  # call: (arguments, verdict)
    "socket": [((1, 5), ALLOW), ((2, 0x80801), ALLOW), ((10, 2), ALLOW), ((2, 3), DENY), ((16, 2), DENY), ((40, 1), DENY)],
    "socketpair": [((1, 2), ALLOW), ((2, 1), DENY)],
    "setsockopt": [
        ((3, 1, 2), ALLOW),
        ((3, 1, 8), NO_OPTION),  # SO_RCVBUF
        ((3, 1, 26), NO_OPTION),  # SO_ATTACH_FILTER
        ((3, 6, 1), ALLOW),
        ((3, 6, 31), NO_OPTION),  # TCP_ULP
        ((3, 41, 26), ALLOW),
        ((3, 17, 103), NO_OPTION),  # UDP_SEGMENT
    ],
    "connect": [((3,), ALLOW)],
    "mknodat": [((3, 0, 0o010644), ALLOW), ((3, 0, 0o100644), ALLOW), ((3, 0, 0o020644), DENY), ((3, 0, 0o060644), DENY)],
    "fchownat": [((3,), GRANTED)],
    "fsetxattr": [((3,), NO_ATTRIBUTES)],
    "mount": [((0,), DENY)],
    "unshare": [((0,), DENY)],
    "setns": [((0,), DENY)],
    "chroot": [((0,), DENY)],
    "ptrace": [((0,), DENY)],
    "clone": [((0x10000000 | 17,), DENY), ((17,), ALLOW)],
    "mmap": [((0, 4096, 3, 0x21), DENY)],
    "memfd_create": [((0,), ABSENT)],
    "sendfile": [((0,), INVALID)],
    "vmsplice": [((0,), DENY)],
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_in_containers(machine: str):
    for name, cases in IN_CONTAINERS.items():
        for arguments, expected in cases:
            assert verdict(machine, numbers(machine)[name], *arguments, in_container=True) == expected, (name, arguments)
    allowed = {number for number in range(YOUNGEST + 1) if verdict(machine, number, in_container=True) == ALLOW}
    added = {name for name, number in numbers(machine).items() if number in allowed} - set(NAMES) - set(LOOKS)
    assert added <= {*seccomp.IN_CONTAINERS.split(), "mknod", "mknodat"}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_short_enough_for_the_kernel(machine: str):
    assert len(seccomp.filter_for(machine, in_container=True)) // 8 <= 4096  # BPF_MAXINSNS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_match_libseccomp(machine: str):
    if (found := ctypes.util.find_library("seccomp")) is None:
        pytest.skip("libseccomp is not here")
    library, known = ctypes.CDLL(found), numbers(machine)
    for name in [*NAMES, *LOOKS]:
        number = library.seccomp_syscall_resolve_name_arch(MACHINES[machine][1], name.encode())
        assert number == known.get(name) or (number < 0 and (name not in known or name in YOUNG)), name


def test_an_unknown_machine():
    with pytest.raises(SandboxError, match="got machine s390x; expected x86_64 or aarch64"):
        seccomp.filter_for("s390x")


def test_the_kernel_refuses_all_others(host: Host):
    """All arguments are 0, so none of the calls would have an effect."""
    listed = {number for name, number in numbers(platform.machine()).items() if name in {*NAMES, *LOOKS}}
    unfiltered = {335, 336}  # uretprobe and uprobe of x86_64, which new kernels let past every filter and answer with a signal
    host.held(f"""
for number in sorted(set(range({YOUNGEST} + 40)) - {listed | unfiltered}):
    expected = errno.EPERM if number <= {YOUNGEST} else errno.ENOSYS
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != expected:
        escaped(number, ctypes.get_errno())
libc.prctl(4, 0) == -1 or escaped("PR_SET_DUMPABLE")
""")
