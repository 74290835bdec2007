"""The filter, run by a small machine as the kernel's for both architectures, and by the kernel for this one's."""

import platform
import re
import struct
from pathlib import Path

import pytest

from pipeline.sandbox import seccomp
from pipeline.sandbox.seccomp import ABSENT, ALLOW, CLONE, CLONE3, DENIED, DENY, IOCTL, KILL, MACHINES, PRCTL, SOCKETPAIR
from tests.sandbox.hosts import Host

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns of a call, by the rules of classic BPF."""
    _, own = MACHINES[machine]
    data = struct.pack(
        "<iIQ6Q", number, own if architecture is None else architecture, 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = list(struct.iter_unpack("<HBBI", seccomp.filter_for(machine)))
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


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_refused(machine: str):
    place = MACHINES[machine][0]
    for name, pair in DENIED.items():
        if pair[place] is not None:
            assert verdict(machine, pair[place]) == DENY, name
    assert verdict(machine, CLONE[place], 0x10000000 | 17) == DENY  # a new user namespace
    assert verdict(machine, CLONE[place], 17) == ALLOW  # fork
    assert verdict(machine, CLONE[place], 0x3D0F00) == ALLOW  # a thread
    assert verdict(machine, CLONE3[place]) == ABSENT
    assert verdict(machine, IOCTL[place], 0, 0x5412) == verdict(machine, IOCTL[place], 0, 1 << 32 | 0x5412) == DENY
    assert verdict(machine, IOCTL[place], 0, 0x5413) == ALLOW  # the size of a terminal
    assert verdict(machine, PRCTL[place], 4) == DENY and verdict(machine, PRCTL[place], 15) == ALLOW
    assert verdict(machine, SOCKETPAIR[place], 1) == ALLOW and verdict(machine, SOCKETPAIR[place], 2) == DENY
    assert verdict(machine, seccomp.YOUNGEST) == ALLOW and verdict(machine, seccomp.YOUNGEST + 1) == ABSENT
    assert verdict(machine, 1 << 30) == ABSENT
    assert verdict(machine, 0xFFFFFFFF - (1 << 32)) == ABSENT
    assert verdict(machine, 41, architecture=0x40000003) == KILL  # i386
    refused = {pair[place] for pair in DENIED.values()} | {CLONE3[place], SOCKETPAIR[place]}
    allowed = [number for number in range(seccomp.YOUNGEST + 1) if verdict(machine, number) == ALLOW]
    assert set(allowed) == set(range(seccomp.YOUNGEST + 1)) - refused


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_kernels(machine: str):
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the kernel's headers are not here")
    text = Path(HEADERS[machine]).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", text)}
    others = {"clone": CLONE, "clone3": CLONE3, "ioctl": IOCTL, "prctl": PRCTL, "socketpair": SOCKETPAIR}
    for name, pair in {**DENIED, **others}.items():
        if pair[MACHINES[machine][0]] is not None:
            assert known[name] == pair[MACHINES[machine][0]], name


def test_a_machine_that_is_not_known():
    with pytest.raises(ValueError, match="x86_64 and aarch64, not those of s390x"):
        seccomp.filter_for("s390x")


def test_the_kernel_refuses_each(host: Host):
    """All arguments are 0, so that none of them would do anything."""
    place = MACHINES[platform.machine()][0]
    numbers = {name: pair[place] for name, pair in DENIED.items() if pair[place] is not None}
    host.held(f"""
for name, number in {numbers}.items():
    libc.syscall(number, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM or escaped(name, ctypes.get_errno())
libc.prctl(4, 0) == -1 or escaped("PR_SET_DUMPABLE")
""")
