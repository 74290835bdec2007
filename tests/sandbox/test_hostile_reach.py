"""Programs that try to reach other files, processes and networks. Each test is one program.

Uncontained they do no harm either, even as root: a mode is set to its current value, a file renamed to its own name, a kernel
switch only opened.
"""

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox.hosts import LIMITS, Host, until

NETWORK = """
import socket
def connect(family, address):
    with socket.socket(family) as made:
        made.connect(address)
refused(connect, socket.AF_INET, ("127.0.0.1", told["port"]))
refused(connect, socket.AF_UNIX, "\\0" + told["abstract"])
refused(connect, socket.AF_UNIX, told["folder"] + "/socket")
"""
RUN_FOLDER = """
refused(open, told["folder"] + "/secret")
refused(open, told["folder"] + "/new", "w")
refused(os.listdir, told["folder"])
"""
LINKS = """
for number, target in enumerate((told["folder"], "/proc/1/root" + told["folder"], "/proc/1/cwd/../.." + told["folder"])):
    os.symlink(target, f"way{number}")
    refused(open, f"way{number}/secret")
refused(open, "../" * 20 + told["folder"] + "/secret")
refused(open, "/proc/self/root/.." + told["folder"] + "/secret")
refused(os.link, told["folder"] + "/secret", "hard")
"""
PROCESSES = """
refused(os.kill, told["pid"], 0)
refused(open, f"/proc/{told['pid']}/environ")
"""


def test_network(host: Host):
    host.held(
        NETWORK
        + """
for family in (socket.AF_INET6, socket.AF_PACKET, socket.AF_NETLINK, 40):  # 40: AF_VSOCK, which no namespace holds
    refused(socket.socket, family, socket.SOCK_DGRAM)
one, other = socket.socketpair()
one.send(b"x")
assert other.recv(1) == b"x"
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
devices == ["lo"] or escaped(devices)
"""
    )


def test_home_folder(host: Host):
    ran = host.held("""
for path in ("~/.bashrc", "~/.ssh", "~/.netrc", "~/.cache/huggingface/token"):
    path = path.replace("~", told["home"])
    if os.path.lexists(path):
        escaped(path)
print(json.dumps(os.listdir(told["home"]) if os.path.isdir(told["home"]) else []))
""")
    seen = ran.stdout.decode().splitlines()[0]
    assert len(seen) <= len('["."]') + 40  # at most the folder on the path to Python


def test_files_of_the_system(host: Host):
    host.held("""
for path in ("/etc/shadow", "/etc/passwd", "/etc/hostname", "/etc/munge", "/var", "/run", "/sys", "/home", "/opt", "/mnt"):
    os.path.lexists(path) and escaped(path)
""")


def test_run_folder(host: Host):
    host.held(RUN_FOLDER)


def test_writes_outside_the_scratch_folder(host: Host):
    host.held("""
library = os.path.dirname(os.__file__)
for folder in ("/", "/usr", "/usr/bin", "/usr/local/lib", "/etc", "/dev", "/proc", "/proc/self", sys.prefix, library):
    refused(open, folder + "/written", "w")
    refused(os.mkdir, folder + "/made")
refused(os.rename, os.__file__, os.__file__)
refused(os.chmod, os.__file__, 0o644)
refused(os.utime, os.__file__)
open("mine", "w").write("x")
""")


def test_escape_by_links_and_dots(host: Host):
    host.held(LINKS)


def test_kills_its_parent(host: Host):
    host.held("""
try:
    os.kill(told["pid"], 0)
except ProcessLookupError:
    pass
else:
    raise SystemExit("these are the machine's processes, and what follows would end them")
if os.getppid() != 1 or os.getpid() > 9:
    raise SystemExit("process 1 may be the machine's")
for number in signal.valid_signals():
    os.kill(1, number)
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
time.sleep(0.2)
os.getppid() == 1 or escaped(os.getppid())
""")


OWN_PROCESS_1 = """
if os.getppid() != 1 or os.getpid() > 9:
    raise SystemExit("process 1 may be the machine's")
"""


def test_limits_of_process_1(host: Host):
    """If they may be lowered, the error that ends process 1 is the program's result."""
    ran = host.run(
        OWN_PROCESS_1
        + """
import resource
limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
for name, number in limits.items():
    try:
        soft, hard = resource.prlimit(1, number)
    except PermissionError:
        continue  # nor may they be read
    if hard != resource.RLIM_INFINITY:
        refused(resource.prlimit, 1, number, (hard, hard + 1))
for name, number in limits.items():
    try:
        resource.prlimit(1, number, (0, 0))
    except OSError:
        pass
end = time.monotonic() + 2.5
while time.monotonic() < end:  # orphans for process 1 to wait for, so that it uses CPU seconds
    if os.fork() == 0:
        for _ in range(5):
            os.fork() or os._exit(0)
        os._exit(0)
    os.wait()
print("still here")
""",
        wall_s=20.0,
        cpu_s=20.0,
        processes=64,
        memory_bytes=1 << 30,  # of orphans that a busy machine lets pile up
    )
    assert b"ESCAPED" not in ran.stdout
    assert ran.ended_by in ("exit", "signal 9", "processes"), ran


def test_process_1_reveals_no_secret(host: Host, monkeypatch: pytest.MonkeyPatch):
    """Checks its memory, environment and open files where they are readable, which is under bubblewrap."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary_of_the_rank")
    ran = host.held(
        OWN_PROCESS_1
        + """
found = []
for line in (open("/proc/1/maps") if os.access("/proc/1/mem", os.R_OK) else ()):
    first, last = (int(end, 16) for end in line.split()[0].split("-"))
    try:
        with open("/proc/1/mem", "rb", buffering=0) as memory:
            memory.seek(first)
            found.append(memory.read(last - first))
    except (OSError, ValueError, OverflowError):
        continue
for name in ("environ", "cmdline"):
    try:
        found.append(open(f"/proc/1/{name}", "rb").read())
    except OSError:
        continue
print("bytes", sum(map(len, found)))
for secret in (b"hf_" + b"canary", b"the canary" + b" sings"):
    any(secret in content for content in found) and escaped(secret)
own = {os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)}
if os.access("/proc/1/fd", os.R_OK):
    for name in os.listdir("/proc/1/fd"):
        target = os.readlink(f"/proc/1/fd/{name}")
        target in own or target in ("anon_inode:[eventfd]", os.readlink("/proc/self/ns/user")) or escaped(target)
        if target not in own:
            refused(os.open, f"/proc/1/fd/{name}", os.O_RDWR)
refused(os.open, "/proc/1/mem", os.O_RDWR)
""",
        wall_s=20.0,
    )
    assert ran.stdout.startswith(b"bytes ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ends_its_guard(tmp_path: Path, number: int):
    """With `sandbox: none` it can, and that is its result, not a failure of the sandbox. The kernel then ends it."""
    sandbox = Sandbox(dataclasses.replace(LIMITS, wall_s=60.0), "none")
    program = f"""
import os, time
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
os.kill(os.getppid(), {int(number)})
time.sleep(600)
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        ran = sandbox.run([sandbox.python, "-c", program])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.status, ran.ended_by) == (-number, f"signal {int(number)}")
    until(lambda: not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}") or None)


def test_signals_to_other_processes(host: Host):
    host.held(
        PROCESSES
        + """
os.getsid(0) in (1, os.getpid()) or escaped("the session is another's")
known = []
for pid in range(1, 1 << 15):
    try:
        os.kill(pid, 0)
        known.append(pid)
    except OSError:
        pass
known in ([1, os.getpid()], [os.getpid()]) or escaped(known)
"""
    )


def test_proc_of_others(host: Host):
    ran = host.held("""
processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
set(processes) <= {1, os.getpid()} or escaped(processes)
for name in ("environ", "mem", "fd", "cwd/.", "root/proc/1/environ", "maps"):
    try:
        content = os.listdir(f"/proc/1/{name}") if name == "fd" else open(f"/proc/1/{name}", "rb").read(1 << 20)
    except OSError:
        continue
    print(name, content)
refused(os.open, "/proc/1/mem", os.O_WRONLY)
""")
    assert b"TOKEN" not in ran.stdout


def test_switches_of_the_kernel(host: Host):
    host.held("""
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/sysrq", "/proc/sys/vm/drop_caches",
             "/proc/sys/kernel/hostname", "/proc/irq/default_smp_affinity", "/sys/kernel/uevent_helper", "/sys/power/state",
             "/proc/self/oom_score_adj", "/proc/self/uid_map", "/proc/kcore", "/proc/kmsg"):
    refused(os.open, path, os.O_WRONLY)
""")


def test_set_user_id(host: Host):
    ran = host.held("""
import shutil, subprocess
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
    int(status[name], 16) and escaped(name, status[name])
status["NoNewPrivs"].strip() == "1" or escaped("new privileges")
shutil.copy("/usr/bin/id", "id")
os.chmod("id", 0o6755)
print(subprocess.run(["./id", "-u"], capture_output=True).stdout.decode().strip())
for work in (os.setuid, os.setgid, os.seteuid):
    refused(work, 0)
refused(os.setgroups, [0])
""")
    assert ran.stdout.split()[0] == b"65534"


def test_is_not_root_outside(host: Host):
    ran = host.held("print(open('/proc/self/uid_map').read()); (os.getuid(), os.getgid()) == (65534, 65534) or escaped('root')")
    inside_to_outside = {line.split()[0]: line.split()[1] for line in ran.stdout.splitlines() if len(line.split()) == 3}
    assert inside_to_outside[b"65534"] != b"0" or host.place == "in a container"  # whose root is the user


def test_reaches_into_other_processes(host: Host):
    host.held("""
libc.ptrace(0, 0, 0, 0) == -1 or escaped("PTRACE_TRACEME")
libc.ptrace(16, 1, 0, 0) == -1 or escaped("PTRACE_ATTACH")
room = ctypes.create_string_buffer(8)
read = libc.process_vm_readv(os.getpid(), room, 1, room, 1, 0)
read == -1 and ctypes.get_errno() == errno.EPERM or escaped("process_vm_readv")
""")


def test_mounts_and_namespaces(host: Host):
    host.held("""
for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    libc.unshare(flag) == -1 or escaped("unshare", hex(flag))
def denied(result, what):
    result == -1 and ctypes.get_errno() == errno.EPERM or escaped(what, ctypes.get_errno())
denied(libc.mount(b"none", b"/nowhere", b"tmpfs", 0, None), "mount")
denied(libc.mount(b"none", b"/nowhere", None, 32 | 4096, None), "remount")
denied(libc.umount2(b"/nowhere", 2), "umount")
denied(libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0), "setns")
refused(os.chroot, ".")
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
denied(libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0), "clone")
libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS or escaped("clone3")
""")


def test_devices(host: Host):
    host.held("""
import stat
devices = ("null", "full", "random", "urandom")
set(os.listdir("/dev")) <= set(devices) or escaped(os.listdir("/dev"))
for kind in (stat.S_IFBLK, stat.S_IFCHR):
    refused(os.mknod, "device", kind | 0o600, os.makedev(1, 1))
for path in (f"/dev/{name}" for name in devices):
    refused(os.chmod, path, stat.S_IMODE(os.stat(path).st_mode))
    refused(os.rename, path, path)
open("/dev/null", "w").write("x")
""")


def test_terminal(host: Host):
    host.held("""
import fcntl
for descriptor in (0, 1, 2):
    refused(fcntl.ioctl, descriptor, 0x5412, b"x")  # TIOCSTI
    refused(fcntl.ioctl, descriptor, 0x541C, b"x")  # TIOCLINUX
refused(os.open, "/dev/tty", os.O_RDWR)
refused(os.open, "/dev/ptmx", os.O_RDWR)
""")


def test_daemon_that_tries_to_survive(host: Host):
    ran = host.run(
        """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork() == 0:
        for _ in range(6000):
            open("heartbeat", "w").write("x")
            time.sleep(0.01)
    os._exit(0)
print("left", flush=True)
""",
        wall_s=60.0,
    )
    assert (ran.status, ran.ended_by, ran.stdout) == (0, "exit", b"left\n")


def test_inherited_descriptors(host: Host):
    opened = os.open(host.folder / "secret", os.O_RDONLY)
    os.set_inheritable(opened, True)
    try:
        host.held("""
for descriptor in range(3, 1 << 12):
    refused(os.fstat, descriptor)
""")
    finally:
        os.close(opened)


def test_secrets_of_the_environment(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    ran = host.held("print(sorted(os.environ)); print(open('/proc/self/environ').read())")
    assert b"canary" not in ran.stdout and b"TOKEN" not in ran.stdout and b"SLURM" not in ran.stdout


def test_stdin_cannot_be_replaced(host: Host):
    host.held("""
for descriptor in (0, os.open("/proc/self/fd/0", os.O_RDWR) if os.access("/proc/self/fd/0", os.W_OK) else 0):
    refused(os.write, descriptor, b"x")
    refused(os.ftruncate, descriptor, 1 << 30)
""")


@pytest.mark.parametrize("program", [NETWORK, RUN_FOLDER, LINKS, PROCESSES])
def test_these_programs_escape_without_a_sandbox(program: str):
    """Without isolation the attacks succeed, so the tests above can fail."""
    free = Host(backend="none")
    try:
        with pytest.raises(AssertionError):  # it also writes into the watched folder
            assert b"ESCAPED" not in free.run(program).stdout
    finally:
        free.close()
