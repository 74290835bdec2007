"""The node-local cache of unpacked images, and the folders below an overlay.

    CACHE               $HETSTEP_IMAGE_CACHE, or hetstep-images-USER in the folder of temporary files
      trees/KEY         a folder image of another owner, an unpacked squashfs, or a layer; complete, since it is renamed there
      new/KEY           a tree while it is made
      locks/KEY         held by who makes a tree; the kernel unlocks it if that process is killed; image_eviction.py has others
      container         an empty folder on which containers mount their root, each in its own mount namespace
      squashfs          likewise for the process that serves a squashfs file

What only the first use of an image needs is imported then, since the container server's forks would copy it.

Files of a tree belong to the sandbox's user.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
from collections.abc import Callable, Sequence

from pipeline.sandbox import image_eviction, linux, squashfs_mount
from pipeline.sandbox.file_system import USER
from pipeline.sandbox.image import Image, ImageError
from pipeline.sandbox.limits import SandboxError

VARIABLE = "HETSTEP_IMAGE_CACHE"
CONTAINER, SQUASHFS = "container", "squashfs"
FOLDERS = ("trees", "new", "locks", CONTAINER, SQUASHFS)
COPY = ("cp", "-dR", "--preserve=mode,timestamps,links", "--reflink=auto")
UNSQUASHFS = ("unsquashfs", "-no-progress", "-quiet", "-no-xattrs", "-ignore-errors", "-no-exit-code", "-d")
FULL = re.compile("No space left|quota exceeded")
INCOMPLETE = re.compile(f"{FULL.pattern}|failed to (?:read|write)")
"""Errors of files that UNSQUASHFS ignores, as it must those of devices and owners that it may not make."""
OWNED = (".", "usr", "etc", "root", "tmp")  # folders whose owner tells whether a folder image is the sandbox's user's


def cache_folder() -> str:
    """Return the cache's folder and make it if it is missing. Raises SandboxError if another user can write there."""
    import tempfile

    folder = os.environ.get(VARIABLE) or f"{tempfile.gettempdir()}/hetstep-images-{linux.outer_user()}"
    try:
        os.makedirs(folder, 0o711, exist_ok=True)
        found = os.lstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022 or not os.path.isdir(folder) or os.path.islink(folder):
            raise SandboxError(
                f"sandbox: the image cache {folder} belongs to another user, or another user can write to it. Try {VARIABLE},"
                " a folder on a disk of the node"
            )
        for name in FOLDERS:
            os.makedirs(f"{folder}/{name}", 0o711, exist_ok=True)
    except OSError as error:
        raise SandboxError(f"sandbox: the image cache {folder} cannot be made: {error}. Try {VARIABLE}") from None
    return folder


def lower_folders(image: Image, cache: str) -> list[str]:
    """Return the folders of an image, the topmost first, in this process's mount namespace, which a squashfs file changes.

    The first use on a node unpacks what squashfuse cannot mount. Raises ImageError and SandboxError.
    """
    if image.form == "oci":
        from pipeline.sandbox.unpack import unpack_layer

        trees: list[str] = []
        for layer in image.layers:
            trees.insert(0, _tree(cache, layer.key, functools.partial(unpack_layer, layer.blob, below=tuple(trees))))
        return trees
    if image.form == "folder":
        owner = USER if linux.is_root() else os.geteuid()
        folders = [folder for name in OWNED if os.path.isdir(folder := f"{image.path}/{name}")]
        if all(os.stat(folder).st_uid == owner for folder in folders):
            return [image.path]
        return [_tree(cache, image.key, functools.partial(_make, image.path, COPY))]
    offset = ("-offset", str(image.offset)) if image.offset else ()
    unpack = functools.partial(_make, image.path, (UNSQUASHFS[0], *offset, *UNSQUASHFS[1:]))
    if os.path.isdir(f"{cache}/trees/{image.key}"):
        return [_tree(cache, image.key, unpack)]
    try:
        squashfs_mount.join(image.path, image.offset, f"{cache}/locks/{image.key}-{linux.place()}", f"{cache}/{SQUASHFS}")
        return [f"{cache}/{SQUASHFS}"]
    except SandboxError as error:
        if linux.program(UNSQUASHFS[0]) is None:
            raise SandboxError(
                f"sandbox: {image.path} cannot be mounted ({error}), and there is no unsquashfs. Try to install squashfuse, or"
                " squashfs-tools, which unpack it once on each node"
            ) from None
        return [_tree(cache, image.key, unpack)]


def _tree(cache: str, key: str, make: Callable[[str], None]) -> str:
    """Return the folder of a tree. Makes it if it is missing: one process does, others wait for it.

    It stays until this process ends. `make` and the processes that it starts hold the lock, so nobody removes what they write.
    """
    tree, new = f"{cache}/trees/{key}", f"{cache}/new/{key}"
    users = image_eviction.use(cache, key)
    if os.path.isdir(tree):
        return tree
    with open(f"{cache}/locks/{key}", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(tree):
            return tree
        os.set_inheritable(lock.fileno(), True)
        for most_bytes in (None, 0):  # on a full disk again, without the trees that nobody uses
            try:
                image_eviction.remove(new)  # of a process that was killed
                image_eviction.make_room(cache, most_bytes)
                make(new)
                image_eviction.record_size(users, new)
                os.rename(new, tree)
                break
            except (OSError, ImageError) as error:
                image_eviction.remove(new)
                full = FULL.search(str(error))
                if full and most_bytes is None:
                    continue
                if isinstance(error, ImageError) and not full:
                    raise
                raise SandboxError(f"sandbox: an image cannot be unpacked to {new}: {error}. Try {VARIABLE}") from None
        image_eviction.make_room(cache)
    return tree


def _make(source: str, command: Sequence[str], tree: str) -> None:
    """Make a tree by `command source tree`, without set-user-id bits and, if root runs it, as nobody's."""
    import subprocess

    command = [*command, *((source, tree) if command is COPY else (tree, source))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, close_fds=False)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    lost = [line for line in lines if INCOMPLETE.search(line)][:1]
    if done.returncode or lost or not os.path.isdir(tree):
        raise ImageError(f"image: {source} cannot be unpacked by {command[0]}: {''.join(lost or lines[-1:])}")
    if linux.is_root():
        subprocess.run(["chown", "-hR", f"{USER}:{USER}", tree], check=True, close_fds=False)
    drop = ["find", tree, "-perm", "/6000", "-not", "-type", "l", "-exec", "chmod", "ug-s", "{}", "+"]
    subprocess.run(drop, check=True, close_fds=False)
