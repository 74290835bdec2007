"""Attacks on containers that take several programs or containers. Imports only the sandbox, so that another user can run it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline.sandbox.container import Container, ContainerEndpoint
from pipeline.sandbox.sandbox import Sandbox

PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
told = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*how):
    print("ESCAPED", *how, flush=True)
def refused(work, *arguments):
    try:
        result = work(*arguments)
    except OSError:
        return
    escaped(work, arguments, result)
"""


class Attacker:
    """Runs programs in containers of one image. told: what an escaped program would find outside, as of hosts.py."""

    def __init__(self, sandbox: Sandbox, image: str, told: dict) -> None:
        self.sandbox, self.image, self.told = sandbox, image, told

    def open(self, endpoint: ContainerEndpoint | None = None) -> Container:
        return self.sandbox.open(self.image, endpoint)

    def holds(self, container: Container, program: str) -> bool:
        """Run a program to its end, and return whether it did not escape."""
        ran = container.run(["python3", "-c", PRELUDE + program + "\nprint('held')"], json.dumps(self.told).encode())
        assert ran.status == 0 and ran.stdout.endswith(b"held\n"), ran
        if b"ESCAPED" in ran.stdout:
            print(ran.stdout.decode(), file=sys.stderr)
        return b"ESCAPED" not in ran.stdout


def other_episodes(at: Attacker) -> bool:
    with at.open() as one, at.open() as other:
        one.write_file("/root/secret", b"the canary of one sings")
        assert at.holds(one, 'open("/root/secret").read() == "the canary of one sings" or escaped()')
        running = one.start(["sleep", "60"])
        held = at.holds(
            other,
            """
refused(open, "/root/secret")
for folder in ("/", "/tmp", "/root", "/dev/shm", "/proc/1/root/root", "/proc/self/root/../root"):
    "secret" in os.listdir(folder) and escaped(folder)
[pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 5] and escaped(os.listdir("/proc"))
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
""",
        )
        return held and running.close() == "closed"


def the_image(at: Attacker) -> bool:
    change = """
for path in ("/opt/kept/file", "/usr/bin/cat", os.__file__):
    os.chmod(path, 0o777)
    open(path, "a").write("# changed")
os.rename("/opt/gone/file", "/opt/gone/moved")
"""
    with at.open() as one:
        assert at.holds(one, change)
        assert one.read_file("/opt/kept/file").endswith(b"# changed")
        with at.open() as other:
            unchanged = other.read_file("/opt/kept/file") == b"of opt/kept\n" == other.read_file("/opt/kept/file")
            return unchanged and not other.read_file("/usr/bin/cat").endswith(b"# changed")


def more_of_the_disk(at: Attacker) -> bool:
    fill = """
left = 0
for folder in ("/work", "/dev/shm", "/tmp", "/usr"):
    os.makedirs(folder, exist_ok=True)
    try:
        for number in range(3):
            with open(f"{folder}/{os.getpid()}-{time.time()}-{number}", "wb", 0) as file:
                left += file.write(bytes(1 << 20))
    except OSError as error:
        error.errno == errno.ENOSPC or escaped(error)
print(left)
"""
    many = """
made = 0
try:
    for number in range(20_000):
        os.mkdir(f"/root/{number}")
        made += 1
except OSError as error:
    error.errno == errno.ENOSPC or escaped(error)
made <= 120 or escaped(made)
"""
    total = """
folders = ("/work", "/dev/shm", "/tmp", "/usr")
sizes = [os.lstat(f"{folder}/{name}").st_size for folder in folders for name in os.listdir(folder)]
3 << 20 < sum(sizes) < 5 << 20 or escaped(sum(sizes))
"""
    with at.open() as one, at.open() as other:
        return all([*(at.holds(one, fill) for _ in range(3)), at.holds(one, total), at.holds(other, many)])


def the_next_program(at: Attacker) -> bool:
    with at.open() as one:
        mark = f"left-{os.getpid()}"
        leave = f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sh', ['sh', '-c', 'sleep 60; : {mark}'])"
        held = at.holds(one, leave)
        held = at.holds(one, 'len([pid for pid in os.listdir("/proc") if pid.isdigit()]) <= 3 or escaped()') and held
        return held and not any(mark in _command(pid) for pid in os.listdir("/proc"))


def the_network(at: Attacker) -> bool:
    with at.open() as one:
        return at.holds(
            one,
            """
def connect(family, kind, address):
    with socket.socket(family, kind) as made:
        made.settimeout(2)
        made.connect(address)
        made.send(b"x")
for address in (("127.0.0.1", told["port"]), ("169.254.169.254", 80), ("10.0.0.1", 80), ("8.8.8.8", 53)):
    refused(connect, socket.AF_INET, socket.SOCK_STREAM, address)
refused(connect, socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53))
for family in (socket.AF_PACKET, socket.AF_NETLINK, 40, 38):  # 40: AF_VSOCK, 38: AF_ALG
    refused(socket.socket, family, socket.SOCK_DGRAM)
for kind in (socket.SOCK_RAW, socket.SOCK_RDM):
    refused(socket.socket, socket.AF_INET, kind)
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
devices == ["lo"] or escaped(devices)
made = socket.socket()
for option in (26, 50, 31, 8, 33, 36):  # SO_ATTACH_FILTER, _BPF; TCP_ULP's number; SO_RCVBUF, _FORCE, SO_MARK
    refused(made.setsockopt, socket.SOL_SOCKET, option, 1 << 20)
refused(made.setsockopt, socket.IPPROTO_TCP, 31, b"tls")
""",
        )


def another_socket(at: Attacker) -> bool:
    folder = tempfile.mkdtemp()
    try:
        with socket.socket(socket.AF_UNIX) as endpoint, socket.socket(socket.AF_UNIX) as other:
            for listener, name in ((endpoint, "endpoint"), (other, "other")):
                listener.bind(f"{folder}/{name}")
                listener.listen()
            at.told = {**at.told, "sockets": folder}
            with at.open(ContainerEndpoint(f"{folder}/endpoint", 8000)) as one:
                control = "socket.create_connection(('127.0.0.1', 8000)).sendall(b'GET')"
                assert at.holds(one, control) and endpoint.accept()[0].recv(3) == b"GET"
                return at.holds(
                    one,
                    """
for path in (told["sockets"] + "/endpoint", told["sockets"] + "/other", told["folder"] + "/socket", "\\0" + told["abstract"]):
    for root in ("", "/proc/1/root", "/proc/self/root/.."):
        refused(socket.socket(socket.AF_UNIX).connect, path if path[0] == "\\0" else root + path)
for port in (8001, 22, told["port"]):
    refused(socket.create_connection, ("127.0.0.1", port), 1)
""",
                )
    finally:
        shutil.rmtree(folder)


def through_proc(at: Attacker) -> bool:
    with at.open() as one:
        return at.holds(
            one,
            """
opened = os.listdir("/proc/self/fd")
len(opened) == 4 or escaped(opened)  # one of them lists them
for pid in ("1", "self", str(os.getppid())):
    for way in ("root", "cwd", "root/proc/1/root"):
        refused(open, f"/proc/{pid}/{way}" + told["folder"] + "/secret")
        refused(open, f"/proc/{pid}/{way}/../../../.." + told["folder"] + "/secret")
    for name in os.listdir(f"/proc/{pid}/fd") if os.access(f"/proc/{pid}/fd", os.R_OK) else ():
        refused(os.listdir, f"/proc/{pid}/fd/{name}/..")
    for kind in ("user", "mnt", "net"):
        try:
            entered = libc.setns(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0)
        except OSError:
            continue
        entered == -1 or escaped(pid, kind)
for path in ("sys/kernel/core_pattern", "sysrq-trigger", "sys/net/ipv4/ip_forward", "self/oom_score_adj", "1/mem"):
    refused(open, "/proc/" + path, "w")
refused(open, f"/proc/{told['pid']}/environ")
""",
        )


def mounts(at: Attacker) -> bool:
    with at.open() as one:
        return at.holds(
            one,
            """
for work, arguments in (
    (libc.mount, (b"none", b"/opt", b"tmpfs", 0, None)),
    (libc.mount, (b"/proc", b"/opt", None, 4096, None)),
    (libc.umount2, (b"/dev/null", 2)),
    (libc.umount2, (b"/proc", 2)),
    (libc.chroot, (b"/opt",)),
    (libc.unshare, (0x10000000,)),
    (libc.unshare, (0x10020000,)),
    (libc.syscall, (428, -100, b"/", 1)),
    (libc.syscall, (304 if os.uname().machine == "x86_64" else 265, -100, b"x" * 16, 0)),
):
    work(*arguments) == -1 or escaped(work, arguments)
pid = libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
pid == -1 or escaped("clone")
for kind in (0o020666, 0o060666):
    refused(os.mknod, "/opt/device", kind, os.makedev(1, 1))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
[status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd")] == ["0000000000000002"] * 3 or escaped(status)
""",
        )


def links_for_the_next_program(at: Attacker) -> bool:
    """Bubblewrap would follow links to its own /oldroot, the machine's root, as it mounts."""
    outside = tempfile.mkdtemp()
    try:
        at.told = {**at.told, "outside": outside}
        with at.open() as one:
            assert at.holds(
                one,
                """
import shutil
done = 0
for name in ("dev", "proc", "tmp", "etc", "root", "work", "oldroot", "newroot", "sys", "run", "usr/lib64"):
    for target in ("/oldroot" + told["outside"], "../oldroot" + told["outside"]):
        try:
            os.path.lexists("/" + name) and os.rename("/" + name, f"/opt/{done}")
            os.symlink(target, "/" + name)
            done += 1
        except OSError:
            pass
for name in ("null", "full", "random", "urandom"):
    refused(os.unlink, "/dev/" + name)
    refused(os.rename, "/dev/" + name, "/dev/other")
done >= 9 or escaped("it changed nothing", done)
""",
            )
            at.holds(one, "open('/dev/null', 'w').write('x')")
            one.run(["sh", "-c", "echo x > /tmp/x; echo x > /work/x"], cwd="/tmp")
            one.run(["true"], cwd="/oldroot")
        return not os.listdir(outside)
    finally:
        shutil.rmtree(outside)


def files_that_are_taken_out(at: Attacker) -> bool:
    outside = tempfile.mkdtemp()
    try:
        with at.open() as one:
            assert at.holds(
                one,
                """
os.makedirs("/out/deep")
open("/out/deep/file", "w").write("x")
os.symlink(told["folder"] + "/secret", "/out/secret")
os.symlink(told["folder"], "/out/folder")
os.symlink("/proc/self/root" + told["folder"] + "/secret", "/out/proc")
os.symlink("/", "/out/root")
os.mkfifo("/out/fifo")
os.symlink(told["folder"] + "/made", "/out/made")
""",
            )
            secret = f"{at.told['folder']}/secret"
            for name in ("secret", "folder/secret", "proc", "fifo", f"root{secret}", f"../..{secret}"):
                try:
                    if b"canary" in one.read_file(f"/out/{name}"):
                        return False
                except ValueError:
                    continue
            with contextlib.suppress(ValueError):
                one.write_file("/out/made", b"x")
            one.get_folder("/out", f"{outside}/copied")
            copied = sorted(str(path.relative_to(outside)) for path in Path(outside).rglob("*"))
            return copied == ["copied", "copied/deep", "copied/deep/file"] and not os.path.exists(f"{at.told['folder']}/made")
    finally:
        shutil.rmtree(outside)


ATTACKS: dict[str, Callable[[Attacker], bool]] = {
    "read another episode's files, or signal its processes": other_episodes,
    "change the image for other episodes": the_image,
    "fill more of the disk, by several programs": more_of_the_disk,
    "leave a process for the next program": the_next_program,
    "reach a network": the_network,
    "reach another socket than the endpoint's": another_socket,
    "escape through /proc": through_proc,
    "mount, or make namespaces and devices": mounts,
    "leave links that the next program's mounts follow": links_for_the_next_program,
    "leave links that lead outside when files are taken out": files_that_are_taken_out,
}


def found(sandbox: Sandbox, image: str, told: dict) -> dict[str, bool]:
    """Return attack -> whether the sandbox held."""
    return {name: attack(Attacker(sandbox, image, told)) for name, attack in ATTACKS.items()}


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
