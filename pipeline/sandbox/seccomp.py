"""Build the kernel's filter of a program's system calls (seccomp(2), SECCOMP_MODE_FILTER).

A filter is a program for a small virtual machine in the kernel, classic BPF: one accumulator, forward jumps only. Each
instruction is a C struct sock_filter {u16 code; u8 jt, jf; u32 k}: the operation, the instructions to skip if a comparison is
true and if it is false, and a constant. The filter reads a struct seccomp_data {i32 nr; u32 arch; u64 ip; u64 args[6]} and
returns what the kernel does with the call.

Namespaces are the main barrier, and the filter stands in front of it. It allows the calls in ALLOWED, and those in `_rules`
with certain arguments, and refuses all others: calls in which kernels have had vulnerabilities, calls that escape the other
limits, and calls of later kernels. A call that is younger than the list fails with ENOSYS, for which libraries have a fallback.

The list has the calls that glibc, CPython with its common libraries and a shell make. It was compared with the default list of
containers (moby/profiles). Calls that only moby's list has stay out if no such program needs them. Besides calls that harm
others, these are left out on purpose:
    memory that no process's size shows    memfd_create, shm*, msg*, sem*, mq_*; vmsplice, splice, tee and sendfile, which keep
                                           a whole huge page for one byte of it in a pipe or a socket
    shared by all programs of a user       inotify_*; sendmsg, as descriptors in flight through sockets count per user
    connections to outside sockets         socket, connect, bind, listen, accept
    socket options                         setsockopt: buffer sizes, the program's own filters
    all file systems of the machine        sync, syncfs
    calls that bypass this filter          io_uring_*, io_setup

In a container (container.py) programs also get sockets of the Internet and of Unix, and named pipes. They reach what is inside
alone: its network namespace has a loopback interface and no other, and no socket file of the machine is there. Its
shared memory is files below /dev/shm. A change of a file's owner succeeds without effect, since no other user exists.

The package system-calls has the numbers. The bytes are made here and not by libseccomp, which cannot give younger calls
an error of their own, has no maintained package for Python, and would have to be in every image.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

from pipeline.sandbox.limits import SandboxError

YOUNGEST = 462  # mseal, of Linux 6.10; x86's second set of calls (x32) begins at 1 << 30
MACHINES = {"x86_64": ("x86_64", 0xC000003E), "aarch64": ("arm64", 0xC00000B7)}  # name in system-calls, AUDIT_ARCH_* of audit.h

ALLOWED = {
    "files": """
        read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close
        close_range dup dup2 dup3 lseek stat fstat lstat newfstatat statx access faccessat faccessat2 statfs fstatfs
        getcwd chdir fchdir mkdir mkdirat rmdir rename renameat renameat2 link linkat symlink symlinkat readlink
        readlinkat unlink unlinkat getdents getdents64 chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
        truncate ftruncate fallocate fadvise64 copy_file_range utime utimes futimesat utimensat umask flock fsync
        fdatasync getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr""",
    "waiting": """
        pipe select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
        eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime""",
    "connected sockets": """
        recvfrom recvmsg recvmmsg shutdown getsockname getpeername getsockopt""",
    "memory": """
        brk munmap mremap mprotect madvise msync membarrier get_mempolicy""",
    "processes and threads": """
        fork vfork execve execveat exit exit_group wait4 waitid set_tid_address set_robust_list get_robust_list rseq
        arch_prctl futex futex_waitv getpid getppid gettid getpgrp getpgid setpgid getsid setsid pidfd_open
        pidfd_send_signal getrlimit setrlimit getrusage getpriority setpriority ioprio_get sched_yield sched_getaffinity
        sched_setaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max sched_get_priority_min
        sched_rr_get_interval getcpu""",
    "identity of a process": """
        getuid geteuid getgid getegid getresuid getresgid getgroups capget""",
    "signals": """
        kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo
        rt_tgsigqueueinfo rt_sigreturn sigaltstack pause restart_syscall""",
    "time": """
        time gettimeofday times clock_gettime clock_getres nanosleep clock_nanosleep alarm getitimer setitimer
        timer_create timer_settime timer_gettime timer_getoverrun timer_delete""",
    "the machine": """
        uname sysinfo getrandom""",
}

IN_CONTAINERS = """
    bind listen accept accept4 connect sendmsg sendmmsg setuid setgid setreuid setregid setresuid setresgid sync_file_range"""
"""More allowed calls in containers. Those that change the user find no other one there."""
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ|K, JMP|JGT|K, JMP|JSET|K, RET|K
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
KILL, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050000  # SECCOMP_RET_KILL_PROCESS, _ALLOW, _ERRNO
DENY, ABSENT, INVALID = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS, REFUSE | errno.EINVAL
NOT_FOR_THIS = REFUSE | errno.ENOTTY  # result of an ioctl that a file does not support
GRANTED = REFUSE  # with error 0: the call returns 0 and the kernel does nothing

NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of linux/sched.h."""
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x1, 0x20, 0x40000  # MAP_SHARED_VALIDATE, 0x3, has MAP_SHARED's bit
AF_UNIX, SOCK_STREAM, NONBLOCK, CLOEXEC = 1, 1, 0x800, 0x80000
AF_INET, AF_INET6, SOCK_DGRAM, SOCK_SEQPACKET = 2, 10, 2, 5
SOCKET_OPTIONS = {
    1: (2, 3, 4, 6, 9, 13, 15, 16, 20, 21, 66, 67),
    6: (1, 3, 4, 5, 6, 7, 8, 9, 12, 18, 23),
    0: (1, 2, 10, 11),
    41: (16, 23, 25, 26, 67),
}
"""Level -> allowed options of setsockopt(2), without sizes of buffers, filters, and protocols above TCP. SOL_SOCKET: REUSEADDR,
TYPE, ERROR, BROADCAST, KEEPALIVE, LINGER, REUSEPORT, PASSCRED, timeouts; IPPROTO_TCP: NODELAY, CORK, KEEP*, SYNCNT, LINGER2,
DEFER_ACCEPT, QUICKACK, USER_TIMEOUT, FASTOPEN; IP and IPV6: TOS, TTL, MTU_DISCOVER, RECVERR, V6ONLY."""
NO_ATTRIBUTES = REFUSE | errno.EOPNOTSUPP  # so that cp and mv go on without
NO_OPTION = REFUSE | errno.ENOPROTOOPT
OTHER_THAN_PIPES = 0x2000 | 0x4000  # bits of S_IFCHR, S_IFBLK, S_IFDIR, S_IFSOCK that S_IFIFO and S_IFREG lack
OF_SENDING = 0x40 | 0x4000 | 0x8000  # MSG_DONTWAIT, MSG_NOSIGNAL, MSG_MORE
NOTIFICATION_PIPE = 0x80
COMMANDS = (0, 1, 2, 3, 4, 5, 1030, 1032, 1034)
"""Allowed commands of fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_GETLK, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS.

Without F_SETPIPE_SZ, since all pipes of a user share a bound, and without F_SETLEASE, F_NOTIFY and locks of open files
(F_OFD_*), which no limit bounds."""
LOCKS = (6, 7)
"""F_SETLK and F_SETLKW succeed without locking anything, since nothing bounds how many locks the kernel keeps.

SQLite needs them and works, but its processes do not exclude each other. flock(2) locks."""
REQUESTS = (0x5401, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed requests of ioctl(2): TCGETS (is this a terminal?), TIOCGWINSZ, TIOCGPGRP, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
OPTIONS = (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 38, 39, 42, 0x53564D41)
"""Allowed options of prctl(2): PDEATHSIG, GET_DUMPABLE, NAME, GET_SECCOMP, CAPBSET_READ, TIMERSLACK, SET_CHILD_SUBREAPER,
NO_NEW_PRIVS, GET_THP_DISABLE, SET_VMA. Without SET_DUMPABLE, which would hide a process from the guard, and SET_SECCOMP."""


def filter_for(machine: str, in_container: bool = False) -> bytes:
    """Return the filter's instructions. machine: as `platform.machine()` returns it. in_container: of a container's programs.

    Raises SandboxError for an unknown machine, and without the package system-calls.
    """
    if machine not in MACHINES:
        raise SandboxError(
            f"sandbox: got machine {machine}; expected {' or '.join(MACHINES)}, which have a filter of system calls"
        )
    try:
        from system_calls import syscalls  # here, since a login node checks recipes without it
    except ModuleNotFoundError:
        raise SandboxError("sandbox: Python lacks the package system-calls, which has the numbers of system calls") from None

    name, architecture = MACHINES[machine]
    numbers = syscalls().load_arch_table(name)
    program = [
        _load(ARCHITECTURE),
        _instruction(EQUAL, 1, 0, architecture),
        _return(KILL),  # 32-bit calls have other numbers
        _load(NUMBER),
    ]
    rules = {**_rules(), **_container_rules()} if in_container else _rules()
    for call, instructions in rules.items():
        if call in numbers:
            program += _if(EQUAL, numbers[call], instructions)
    for call in " ".join([*ALLOWED.values(), IN_CONTAINERS * in_container]).split():
        if call in numbers and call not in rules:  # aarch64 lacks some old ones
            program += _if(EQUAL, numbers[call], [_return(ALLOW)])
    program += _if(GREATER, YOUNGEST, [_return(ABSENT)])
    program.append(_return(DENY))
    return b"".join(program)


def _rules() -> dict[str, list[bytes]]:
    """Return call -> its instructions, for the calls that are allowed only with certain arguments, the most frequent first."""
    shared = [*_if(ANY_BIT, MAP_ANONYMOUS, _if(ANY_BIT, MAP_SHARED, [_return(DENY)]))]
    streams = [SOCK_STREAM | flags for flags in (0, NONBLOCK, CLOEXEC, NONBLOCK | CLOEXEC)]
    return {
        "mmap": [_argument(3), *_if(ANY_BIT, MAP_HUGETLB, [_return(DENY)]), *shared, _return(ALLOW)],
        "fcntl": [_argument(1), *_among(COMMANDS), *_among(LOCKS, GRANTED), _return(INVALID)],
        "ioctl": [_argument(1), *_among(REQUESTS), _return(NOT_FOR_THIS)],
        "prctl": [_argument(0), *_among(OPTIONS), _return(INVALID)],
        "clone": [_argument(0), *_if(ANY_BIT, NAMESPACES, [_return(DENY)]), _return(ALLOW)],
        "prlimit64": [_argument(0), *_among((0,)), _return(DENY)],  # 0: the process itself
        "pipe2": [_argument(1), *_if(ANY_BIT, NOTIFICATION_PIPE, [_return(INVALID)]), _return(ALLOW)],
        "socketpair": [_argument(0), *_if(EQUAL, AF_UNIX, [_argument(1), *_among(streams)]), _return(DENY)],
        "sendto": [_argument(3), *_if(ANY_BIT, ~OF_SENDING & 0xFFFFFFFF, [_return(DENY)]), _return(ALLOW)],
        "clone3": [_return(ABSENT)],  # a filter cannot read its flags in memory; libraries then use clone
    }


def _container_rules() -> dict[str, list[bytes]]:
    """Return call -> its instructions, for calls that containers add or that differ there."""
    flags = (0, NONBLOCK, CLOEXEC, NONBLOCK | CLOEXEC)
    streams, others = (
        [kind | flag for kind in kinds for flag in flags] for kinds in ((SOCK_STREAM, SOCK_DGRAM), (SOCK_SEQPACKET,))
    )
    kinds = [_argument(1), *_among(streams), _return(DENY)]
    unix = [_argument(1), *_among(streams + others), _return(DENY)]
    families = [*_if(EQUAL, AF_UNIX, unix), *_if(EQUAL, AF_INET, kinds), *_if(EQUAL, AF_INET6, kinds)]
    options: list[bytes] = []
    for level, names in SOCKET_OPTIONS.items():
        options += [_argument(1), *_if(EQUAL, level, [_argument(2), *_among(names), _return(NO_OPTION)])]
    no_device = [*_if(ANY_BIT, OTHER_THAN_PIPES, [_return(DENY)]), _return(ALLOW)]
    return {
        "socket": [_argument(0), *families, _return(DENY)],
        "socketpair": [_argument(0), *_if(EQUAL, AF_UNIX, unix), _return(DENY)],
        "setsockopt": [*options, _return(NO_OPTION)],
        "sendto": [_return(ALLOW)],
        "mknod": [_argument(1), *no_device],
        "mknodat": [_argument(2), *no_device],
        **{call: [_return(INVALID)] for call in ("sendfile", "splice")},  # libraries then read and write
        "memfd_create": [_return(ABSENT)],
        **{call: [_return(NO_ATTRIBUTES)] for call in ("setxattr", "lsetxattr", "fsetxattr")},
        **{call: [_return(GRANTED)] for call in ("chown", "lchown", "fchown", "fchownat")},
    }


def _instruction(code: int, if_true: int, if_false: int, constant: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, constant)


def _load(offset: int) -> bytes:
    """Return the instruction that loads the 32 bits at `offset` into the accumulator."""
    return _instruction(LOAD, 0, 0, offset)


def _argument(number: int) -> bytes:
    """Return the instruction that loads the lower half of an argument, the only half that the kernel reads of these arguments.

    Both machines are little-endian.
    """
    return _load(ARGUMENTS + 8 * number)


def _if(comparison: int, constant: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(comparison, 0, len(then), constant), *then]


def _among(constants: Iterable[int], then: int = ALLOW) -> list[bytes]:
    return [instruction for constant in constants for instruction in _if(EQUAL, constant, [_return(then)])]


def _return(action: int) -> bytes:
    return _instruction(RETURN, 0, 0, action)
