"""Bound the disk space of unpacked images: trees that no container uses are removed, the least recently used first.

    CACHE
      locks/KEY.users     locked, shared, by each process that uses the tree KEY, until it ends; written to: the tree's bytes;
                          its time is that of the last use
      locks/eviction      locked by who removes trees
      new/KEY.gone        a tree that is being removed

The kernel drops the locks of a process that is killed; the next one to remove trees finishes what it has left.
"""

from __future__ import annotations

import fcntl
import os

SHARE = 0.5
"""Part of the disk's free space, were there no trees, that trees may take."""
GONE = ".gone"


def use(cache: str, key: str) -> int:
    """Keep the tree `key` until this process ends, and return the descriptor that does so. Waits while it is being removed."""
    users = os.open(_users(cache, key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(users, fcntl.LOCK_SH)
    os.utime(users)
    return users


def record_size(users: int, tree: str) -> int:
    """Measure a tree, write its bytes to the file of its users, and return them."""
    import subprocess  # here, since the container server's forks would copy it

    measured = subprocess.run(["du", "-s", "--block-size=1", tree], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    size = int(measured.stdout.split()[0])
    os.ftruncate(users, 0)
    os.pwrite(users, f"{size}\n".encode(), 0)
    return size


def make_room(cache: str, most_bytes: float | None = None) -> None:
    """Remove unused trees until the others take `most_bytes`, by default their share, and what killed processes have left."""
    with open(f"{cache}/locks/eviction", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in os.listdir(f"{cache}/new"):
            _remove_left(cache, name)
        last_used, sizes = {}, {}
        for key in os.listdir(f"{cache}/trees"):
            last_used[key], sizes[key] = _state(cache, key)
        total = sum(sizes.values())
        most = _most_bytes(cache, total) if most_bytes is None else most_bytes
        for key in sorted(last_used, key=last_used.__getitem__):
            if total <= most:
                return
            if _remove_unused(cache, key):
                total -= sizes[key]


def remove(folder: str) -> None:
    """Remove a tree, also one with folders that its owner may not write to."""
    import subprocess

    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, folder], stderr=subprocess.DEVNULL)


def _users(cache: str, key: str) -> str:
    return f"{cache}/locks/{key}.users"


def _most_bytes(cache: str, taken: int) -> float:
    """Return the bytes that trees may take. taken: those that they take now."""
    disk = os.statvfs(cache)
    return SHARE * (taken + disk.f_bavail * disk.f_frsize)


def _state(cache: str, key: str) -> tuple[float, int]:
    """Return the time of a tree's last use, and its bytes."""
    with open(_users(cache, key), "a+") as users:
        last_used = os.fstat(users.fileno()).st_mtime
        users.seek(0)
        text = users.read()
        return last_used, int(text) if text.endswith("\n") else record_size(users.fileno(), f"{cache}/trees/{key}")


def _remove_unused(cache: str, key: str) -> bool:
    """Remove a tree, and return True, unless a process uses it."""
    with open(_users(cache, key), "a") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.rename(f"{cache}/trees/{key}", gone := f"{cache}/new/{key}{GONE}")
    remove(gone)
    return True


def _remove_left(cache: str, name: str) -> None:
    """Remove what a killed process has left of a tree that it removed, or that it made."""
    with open(f"{cache}/locks/{name.removesuffix(GONE)}", "a") as making:
        if not name.endswith(GONE):
            try:
                fcntl.flock(making, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        remove(f"{cache}/new/{name}")
