"""Temporary folders of episodes, and those that killed processes have left."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import tempfile

PREFIX = "hetstep-episode-"
REMOVE = 'chmod -R u+rwX "$@"; exec rm -rf "$@"'


class EpisodeFolder:
    """A temporary folder, which others cannot enter. It is locked as long as its process lives."""

    def __init__(self, place: str | None = None) -> None:
        """Make a folder. place: where; None: in that of temporary files."""
        made = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place)
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
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
    for folder in (name for place in {tempfile.gettempdir(), "/tmp"} for name in glob.glob(f"{place}/{PREFIX}*")):
        with contextlib.suppress(OSError):  # it is another user's, it has just gone, or its process lives
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    left.append(folder)
            finally:
                os.close(descriptor)
    if left:
        subprocess.Popen(["sh", "-c", REMOVE, "sh", *left], stderr=subprocess.DEVNULL)
