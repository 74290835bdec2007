"""Unpack a layer of an OCI image into a folder that an overlay can take (image-spec/layer.md).

The kernel keeps the files in the folder: a process with no other folder as its root writes them, so `..`, absolute names and
links of the archive end inside. A whiteout becomes what the kernel's overlay takes for one: a character device 0:0, or the
attribute `user.overlay.opaque` of a folder. Devices are left out, set-user-id bits are dropped, and one user owns all files.
"""

from __future__ import annotations

import contextlib
import os
import shutil  # imports zlib, bz2 and lzma, which the process without other folders could not
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from typing import IO

from pipeline.sandbox import linux
from pipeline.sandbox.file_system import USER
from pipeline.sandbox.image import ImageError

WHITEOUT, AUFS, OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
ATTRIBUTE = "user.overlay.opaque"
ZSTD = b"\x28\xb5\x2f\xfd"
MODE = 0o1777


def unpack_layer(blob: str, tree: str, below: Sequence[str]) -> None:
    """Unpack the archive `blob` into the new folder `tree`. below: the layers under it, the topmost first.

    The folders of a path that the archive does not list get their modes from `below`. Raises ImageError and OSError.
    """
    os.mkdir(tree, 0o755)
    if linux.is_root():
        os.chown(tree, USER, USER)
    reader, writer = os.pipe()
    folders = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in below]
    with open(blob, "rb") as file, _decompressed(file) as archive:
        if (child := os.fork()) == 0:
            message = b""
            try:
                linux.enter_user_namespace(0)
                linux.die_with_parent()
                os.chroot(tree)
                os.chdir("/")
                os.umask(0)
                with tarfile.open(fileobj=archive, mode="r|*") as entries:
                    entries.extraction_filter = tarfile.fully_trusted_filter  # the kernel checks paths
                    for entry in entries:
                        _unpack_entry(entries, entry, folders)
            except BaseException as error:
                message = f"{type(error).__name__}: {error}".encode()[:1000]
            finally:
                with contextlib.suppress(OSError):
                    os.write(writer, message)
                os._exit(bool(message))
    for descriptor in (writer, *folders):
        os.close(descriptor)
    message = os.read(reader, 1000).decode(errors="replace")
    os.close(reader)
    if os.waitpid(child, 0)[1] or message:
        raise ImageError(f"image: the layer {blob} cannot be unpacked: {message or 'its process was killed'}")


@contextlib.contextmanager
def _decompressed(file: IO[bytes]):
    """Yield the archive as a stream that tarfile reads, which knows gzip and no zstd."""
    if os.pread(file.fileno(), len(ZSTD), 0) != ZSTD:
        yield file
        return
    if (program := linux.program("zstd")) is None:
        raise ImageError(f"image: the layer {file.name} is compressed by zstd. Try to install zstd")
    with subprocess.Popen([program, "-dcq"], stdin=file, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout


def _unpack_entry(entries: tarfile.TarFile, entry: tarfile.TarInfo, below: Sequence[int]) -> None:
    """Unpack one entry into /."""
    path = os.path.normpath("/" + entry.name).replace("//", "/")
    folder, name = os.path.split(path)
    if path == "/":
        os.chmod("/", entry.mode & MODE)
        return
    _make_folders(folder, below)
    if name == OPAQUE:
        os.setxattr(folder, ATTRIBUTE, b"y")
    elif name.startswith(WHITEOUT):
        hidden = f"{folder}/{name.removeprefix(WHITEOUT)}"
        if not name.startswith(AUFS) and not os.path.lexists(hidden):
            os.mknod(hidden, stat.S_IFCHR, 0)
    elif entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() or entry.isfifo():
        replaced = _remove(path, keep=entry.isdir())
        entry.name, entry.mode = path.lstrip("/"), entry.mode & MODE
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        if entry.islnk():
            entry.linkname = os.path.normpath("/" + entry.linkname).lstrip("/")
        entries.extract(entry, "/")
        if replaced and entry.isdir():
            os.setxattr(path, ATTRIBUTE, b"y")


def _make_folders(path: str, below: Sequence[int]) -> None:
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path), below)
    mode = 0o755
    for folder in below:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(path.lstrip("/"), dir_fd=folder, follow_symlinks=False).st_mode) & MODE
            break
    _remove(path, keep=True)
    os.mkdir(path, mode)


def _remove(path: str, keep: bool) -> bool:
    """Remove what is at `path`, and return whether it was a whiteout. keep: leave a folder as it is."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(path)
    elif not keep:
        shutil.rmtree(path)
    return stat.S_ISCHR(found.st_mode)
