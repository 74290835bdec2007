"""Temporary folders of episodes, and those that killed processes have left."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import tempfile
import time
import zlib

PREFIX = f"hetstep-episode-{zlib.crc32(os.uname().nodename.encode()):08x}-"
"""Names the node, since nodes that share a file system may not see each other's locks. A socket's path in the folder fits."""
UNLOCKED_S = 60.0
"""Age from which a folder that is not locked yet is one that a killed process has left."""
REMOVE = 'chmod -R u+rwX "$@"; exec rm -rf "$@"'


class EpisodeFolder:
    """A temporary folder, which others cannot enter. It is locked as long as its process lives."""

    def __init__(self, place: str | None = None) -> None:
        """Make a folder. place: where; None: in that of temporary files. Raises OSError if it cannot be made or locked."""
        made = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place)
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            os.close(self._lock)
            os.rmdir(made)
            where = os.path.dirname(made)
            reason = f"{where}: folders cannot be locked there: {error.strerror}. Try TMPDIR, a folder on a disk of the node"
            raise OSError(error.errno, reason) from None
        folder, name = os.path.split(made)
        self.path = os.path.join(folder, name[1:])
        os.rename(made, self.path)  # `remove_left` sees it from now on

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left() -> None:
    """Remove this user's folders of processes that were killed, in a process of its own, for which this does not wait."""
    left: list[str] = []
    places = {tempfile.gettempdir(), "/tmp"}
    for folder in (name for place in places for dot in ("", ".") for name in glob.glob(f"{place}/{dot}{PREFIX}*")):
        with contextlib.suppress(OSError):  # it is another user's, it has just gone, or its process lives
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(descriptor)
                young = os.path.basename(folder).startswith(".") and found.st_mtime > time.time() - UNLOCKED_S
                if found.st_uid == os.geteuid() and not young:
                    left.append(folder)
            finally:
                os.close(descriptor)
    if left:
        subprocess.Popen(["sh", "-c", REMOVE, "sh", *left], stderr=subprocess.DEVNULL)
