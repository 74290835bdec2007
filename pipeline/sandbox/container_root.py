"""Build the root file system of a container, and move files in and out of it.

The process that builds it keeps it: it enters namespaces of its own (users, mounts, network), mounts an overlay of the image's
folders and of a tmpfs there, makes the overlay its own root, and serves files until its socket is closed. Programs of the
container enter its namespaces (start.py). With the process go the namespaces, and with them the mounts and all files.

The size of the tmpfs and its number of files are the kernel's bounds on what a container writes. The programs' root user is the
sandbox's user outside, and the only user inside.

    CACHE/container             the tmpfs
      upper, work               of the overlay
      dev                       mounted on the root's /dev; its shm is thus bounded too
      root                      the overlay
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import struct
import time
from typing import Any

from pipeline.sandbox import image_cache, linux
from pipeline.sandbox.file_system import DEVICES
from pipeline.sandbox.image import Image, ImageError, ImageLayer
from pipeline.sandbox.limits import SandboxError

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40  # netdevice(7)
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
FOLDERS = {"tmp": 0o1777, "root": 0o700, "etc": 0o755, "dev": 0o755, "proc": 0o555}
MOUNT_POINTS = ("dev", "proc")
ENROOT_WORKDIR = re.compile(r'^\s*cd "(/[^"]*)" && unset OLDPWD', re.MULTILINE)
SCRIPTS = "/.singularity.d/env"  # of images that Apptainer makes: they set the image's variables
HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost\n"
TCP_BUFFERS = "4096 65536 131072"  # bytes of a socket: least, at first, most; the kernel's own most is 6 MB
FUSE_OVERLAY = "fuse-overlayfs"
FUSE_S = 20.0
CHUNK = 1 << 20
REMEDIES = (
    "Try Linux 6.6 or later, or to install fuse-overlayfs and let users open /dev/fuse; and let users make namespaces"
    " (sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1,"
    " kernel.apparmor_restrict_unprivileged_userns=0; in Docker, --security-opt seccomp=unconfined)"
)


def keep(asked: dict[str, Any], control: socket.socket) -> None:
    """Build a container's root, answer on `control`, and serve files until it is closed.

    asked: `image`, the fields of an Image; `cache`, the folder of image_cache.py; `scratch_bytes`, `scratch_files`; `port` of
    the endpoint, or None. The answer is a line of JSON, with `environment`, `workdir` and `has_scripts`, or `error`. With it
    come descriptors of this process and, with a port, of a socket that listens there.
    """
    try:
        fields = dict(asked["image"])
        image = Image(**{**fields, "layers": [ImageLayer(**layer) for layer in fields["layers"]]})
        _build(image, asked["cache"], asked["scratch_bytes"], asked["scratch_files"])
        listeners = [] if asked["port"] is None else [_listener(asked["port"])]
        environment = {**_enroot_environment(), **image.environment}
        workdir = image.workdir or _enroot_workdir()
        with contextlib.suppress(OSError):  # programs that start there then say why
            os.makedirs(workdir, exist_ok=True)
        answer = {"environment": environment, "workdir": workdir, "has_scripts": os.path.isdir(SCRIPTS)}
        descriptors = [os.pidfd_open(os.getpid()), *(listener.fileno() for listener in listeners)]
    except Exception as error:
        kind = "image" if isinstance(error, ImageError) else "sandbox"
        text = str(error) if isinstance(error, SandboxError) else f"sandbox: a container's root cannot be built: {error!r}"
        answer, descriptors, listeners = {"error": text, "kind": kind}, [], []
    socket.send_fds(control, [json.dumps(answer).encode() + b"\n"], descriptors)
    for listener in listeners:
        listener.close()
    with control.makefile("rwb") as stream:
        while line := stream.readline():
            _serve(json.loads(line), stream)


def _build(image: Image, cache: str, scratch_bytes: int, scratch_files: int) -> None:
    """Build the root, and make it this process's root. Raises OSError, ImageError and SandboxError."""
    place = f"{cache}/{image_cache.CONTAINER}"
    folders = image_cache.lower_folders(image, cache)
    try:
        linux.enter_user_namespace(linux.NEWNS | linux.NEWNET)
        linux.die_with_parent()
        linux.make_mounts_private()
        lower = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in folders]
        options = f"size={scratch_bytes},nr_inodes={scratch_files + 16},mode=755"
        linux.call("mount", "tmpfs", place, "tmpfs", linux.NOSUID | linux.NODEV, options)
        os.chdir(place)
        for name in ("upper", "work", "dev", "root"):
            os.mkdir(name, 0o755)
        os.chmod("upper", stat.S_IMODE(os.stat(f"/proc/self/fd/{lower[0]}").st_mode))
        _mount_overlay(lower)
    except (OSError, SandboxError) as error:
        raise SandboxError(f"sandbox: a container's root cannot be built: {error}. {REMEDIES}") from None
    _fill_dev()
    for name, mode in FOLDERS.items():
        if not os.path.lexists(f"root/{name}"):
            os.mkdir(f"root/{name}")
            os.chmod(f"root/{name}", mode)
    for name in MOUNT_POINTS:
        if not stat.S_ISDIR(os.lstat(f"root/{name}").st_mode):
            raise ImageError(f"image: got {image.path}, whose /{name} is no folder")
    linux.call("mount", "dev", "root/dev", None, linux.BIND | linux.REC, None)
    _bring_loopback_up()
    os.chroot("root")
    os.chdir("/")
    os.umask(0o022)
    with contextlib.suppress(OSError):  # such as a link to nowhere
        if not os.path.exists("/etc/hosts") or os.path.getsize("/etc/hosts") == 0:
            _write("/etc/hosts", HOSTS)


def _mount_overlay(lower: list[int]) -> None:
    """Mount the overlay on `root`: the kernel's where it works for a user, else that of fuse-overlayfs. Raises OSError."""
    folders = ":".join(f"/proc/self/fd/{folder}" for folder in lower)
    options = f"lowerdir={folders},upperdir=upper,workdir=work"
    try:
        os.setxattr("upper", "user.overlay.tried", b"y")  # fails before Linux 6.6: folders of the image could not be replaced
        os.removexattr("upper", "user.overlay.tried")
        linux.call("mount", "overlay", "root", "overlay", linux.NOSUID | linux.NODEV, f"{options},userxattr")
        return
    except OSError as error:
        reason = f"the kernel's overlay: {error}"
        if (program := linux.program(FUSE_OVERLAY)) is None:
            raise SandboxError(f"{reason}; and there is no {FUSE_OVERLAY}") from None
    before, until = os.stat("root").st_dev, time.monotonic() + FUSE_S
    errors, errors_writer = os.pipe()
    if (child := os.fork()) == 0:
        linux.die_with_parent()
        os.dup2(errors_writer, 2)
        for folder in lower:
            os.set_inheritable(folder, True)
        os.execv(program, [program, "-f", "-o", f"{options},allow_other,squash_to_root", "root"])
    os.close(errors_writer)
    while os.stat("root").st_dev == before:
        if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > until:
            last_line = os.read(errors, CHUNK).decode(errors="replace").strip().splitlines()[-1:]
            raise SandboxError(f"{reason}; {FUSE_OVERLAY}: {''.join(last_line)}")
        time.sleep(0.002)


def _fill_dev() -> None:
    for device in DEVICES:
        target = device.removeprefix("/")
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        linux.protect_device(device, target)
    for name, target in LINKS.items():
        os.symlink(target, f"dev/{name}")
    os.mkdir("dev/shm")
    os.chmod("dev/shm", 0o1777)


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP | IFF_RUNNING))
    for name in ("tcp_rmem", "tcp_wmem"):
        with contextlib.suppress(OSError):  # some containers show /proc/sys read-only
            _write(f"/proc/sys/net/ipv4/{name}", TCP_BUFFERS)


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def _enroot_environment() -> dict[str, str]:
    """Return the variables of /etc/environment, where `enroot import` writes those of the image."""
    lines = _read_text("/etc/environment").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name: value.strip('"') for name, _, value in pairs if name.isidentifier()}


def _enroot_workdir() -> str:
    """Return the working folder of /etc/rc, where `enroot import` writes that of the image; / without one."""
    found = ENROOT_WORKDIR.search(_read_text("/etc/rc"))
    return found[1] if found else "/"


def _read_text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# ---- files -------------------------------------------------------------------------------------------------------------------


def _serve(asked: dict[str, Any], stream: Any) -> None:
    """Read or write one file, or list a folder. This process's root is the container's, so links lead to files of it alone."""
    content = stream.read(asked["size"]) if asked["do"] == "write" else b""
    answer: dict[str, Any] = {}
    try:
        match asked["do"]:
            case "write":
                _write_file(asked["path"], content, asked["mode"])
            case "read":
                content = _read_file(asked["path"], asked["most"])
                answer["size"] = len(content)
            case "list":
                answer["files"] = _files(asked["path"], asked["most"])
    except (OSError, ValueError) as error:
        content, answer = b"", {"error": str(error)}
    stream.write(json.dumps(answer).encode() + b"\n")
    if asked["do"] == "read":
        stream.write(content)
    stream.flush()


def _write_file(path: str, content: bytes, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
    with open(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no regular file")
        file.write(content)
    os.chmod(path, mode)


def _read_file(path: str, most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def _files(path: str, most: int) -> list[tuple[str, int, int]]:
    """Return (path below `path`, mode, bytes) of all regular files below a folder, without following links."""
    found: list[tuple[str, int, int]] = []
    folders = [path.rstrip("/")]
    while folders:
        folder = folders.pop()
        for entry in os.scandir(folder or "/"):
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{folder}/{entry.name}")
            elif entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                found.append((os.path.relpath(entry.path, path), stat.S_IMODE(state.st_mode) & 0o777, state.st_size))
                if len(found) > most:
                    raise ValueError(f"{path} has more than {most} files")
    return found
