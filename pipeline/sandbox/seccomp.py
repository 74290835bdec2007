"""The system calls that a program in the sandbox cannot make, as a filter for the kernel (seccomp(2), SECCOMP_MODE_FILTER).

A filter is a program for a small machine of the kernel's, classic BPF: one accumulator, jumps forward only. Each of its
instructions is a C struct sock_filter {u16 code; u8 jt, jf; u32 k}: what to do, how many instructions to skip if a comparison
holds and if it does not, and a constant. It reads a struct seccomp_data {i32 nr; u32 arch; u64 ip; u64 args[6]} and returns
what becomes of the call.

The namespaces are the wall; this stands before it. It refuses what such programs do not need and where kernels have had their
holes, what escapes the other limits (io_uring, memory that no process's size shows), and sockets of kinds that have no network
namespace (vsock). A call that is younger than the list does not exist, for which libraries have another way.
"""

from __future__ import annotations

import errno
import struct

DENIED = {  # (x86_64, aarch64); None: it has no such call. From asm/unistd_64.h and asm-generic/unistd.h
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # the kernel
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "syslog": (103, 116),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # keys, which no namespace holds
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # file systems and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # the machine
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory that no process's size shows
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # what works on behalf of a process past this filter
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    # any network
    "socket": (41, 198),
}
CLONE, CLONE3, IOCTL, PRCTL, SOCKETPAIR = (56, 220), (435, 435), (16, 29), (157, 167), (53, 199)
YOUNGEST = 462  # mseal, of Linux 6.10; x86's second set of calls (x32) begins at 1 << 30
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # place in the pairs above; AUDIT_ARCH_* of linux/audit.h

NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of linux/sched.h."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # put characters into a terminal's input
PR_SET_DUMPABLE = 4  # would hide a process from the guard
AF_UNIX = 1  # a pair of connected sockets, as asyncio needs, reaches nothing else

LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JGT|K, JMP|JSET|K, RET|K
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000  # SECCOMP_RET_KILL_PROCESS, _ERRNO, _ALLOW
DENY, ABSENT = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS


def filter_for(machine: str) -> bytes:
    """The instructions for a kernel of `platform.machine()`. Raises ValueError for a machine that is not known."""
    if machine not in MACHINES:
        raise ValueError(f"the sandbox knows the system calls of {' and '.join(MACHINES)}, not those of {machine}")
    place, architecture = MACHINES[machine]
    program = [
        _load(ARCHITECTURE),
        _instruction(EQUAL, 1, 0, architecture),
        _return(KILL),  # 32-bit calls have other numbers
        _load(NUMBER),
        *_if(GREATER, YOUNGEST, [_return(ABSENT)]),
        *_if(EQUAL, CLONE3[place], [_return(ABSENT)]),  # its flags lie in memory, out of reach; libraries then take clone
    ]
    for pair in DENIED.values():
        if pair[place] is not None:
            program += _if(EQUAL, pair[place], [_return(DENY)])
    flags, request, option, family = _argument(0), _argument(1), _argument(0), _argument(0)
    program += _if(EQUAL, CLONE[place], [flags, *_if(ANY_BIT, NAMESPACES, [_return(DENY)]), _return(ALLOW)])
    terminal = [instruction for call in (TIOCSTI, TIOCLINUX) for instruction in _if(EQUAL, call, [_return(DENY)])]
    program += _if(EQUAL, IOCTL[place], [request, *terminal, _return(ALLOW)])
    program += _if(EQUAL, PRCTL[place], [option, *_if(EQUAL, PR_SET_DUMPABLE, [_return(DENY)]), _return(ALLOW)])
    program += _if(EQUAL, SOCKETPAIR[place], [family, *_if(EQUAL, AF_UNIX, [_return(ALLOW)]), _return(DENY)])
    program.append(_return(ALLOW))
    return b"".join(program)


def _instruction(code: int, if_true: int, if_false: int, constant: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, constant)


def _load(offset: int) -> bytes:
    """The accumulator becomes the 32 bits at `offset`."""
    return _instruction(LOAD, 0, 0, offset)


def _argument(number: int) -> bytes:
    """Its lower half, which is all that the kernel reads of those that are looked at here. Both machines are little-endian."""
    return _load(ARGUMENTS + 8 * number)


def _if(comparison: int, constant: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(comparison, 0, len(then), constant), *then]


def _return(what: int) -> bytes:
    return _instruction(RETURN, 0, 0, what)
