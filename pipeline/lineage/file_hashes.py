"""Compute SHA-256 of files, and cache them under the files' state, so that an unchanged file is read only once.

The cache is a file of the user beside the run folders, so that other runs can use the hashes too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from pipeline.files import digests, small_files
from pipeline.files.storage import open_own
from pipeline.recipe import user_files
from pipeline.recipe.problems import RecipeError


@dataclass(frozen=True)
class FileState:
    """The state of a file when it was looked at. It changes if the content changes, unless somebody resets the file's time."""

    path: str  # absolute
    size: int  # bytes
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of a file; for a link, the state of its target. Raises OSError."""
        status = path.stat()
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ino)


def cache_path(runs: Path) -> Path:
    """Return the path of this user's cache in a folder of runs."""
    return runs / f".hashes-{os.geteuid()}.jsonl"


class HashCache:
    """Holds file state -> SHA-256, in a file to which each new hash appends a line. Another user's file is not read."""

    def __init__(self, path: Path | None):
        """Open the cache at a path. None: a cache in memory only, empty at first."""
        self._path = path
        self._digests: dict[FileState, str] = {}
        if path is not None:
            self._digests = dict(read_hashes(path, own=True))

    @classmethod
    def below(cls, runs: Path) -> HashCache:
        """Open this user's cache in a folder of runs; a cache in memory if there is no such folder."""
        return cls(cache_path(runs) if runs.is_dir() else None)

    def get(self, state: FileState) -> str | None:
        """Return the SHA-256 of a file in this state, in hex; None if it is unknown."""
        return self._digests.get(state)

    def sha256(self, path: Path, stop: Callable[[], bool] = lambda: False) -> tuple[FileState, str]:
        """Return (state, SHA-256) of a file. stop: as that of `digests.sha256`.

        Raises OSError.
        """
        while True:
            state = FileState.of(path)
            if digest := self.get(state):
                return state, digest
            digest = digests.sha256(path, stop)
            if FileState.of(path) == state:  # else it was written meanwhile
                break
        self.add(state, digest)
        return state, digest

    def add(self, state: FileState, digest: str) -> None:
        """Add the SHA-256 of a file with this state to the cache."""
        self._digests[state] = digest
        if self._path is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
                append_hash(self._path, state, digest)


def read_hashes(path: Path, own: bool = False) -> Iterator[tuple[FileState, str]]:
    """Yield (state, SHA-256) of each line of a file of hashes; nothing if this user may not read the file.

    Lines that two writers have mixed up are left out. own: read only a file of this user, since another user could have put
    wrong hashes into theirs.
    """
    for line in complete_lines(path, own):
        with contextlib.suppress(RecipeError):
            values = small_files.parsed(line, _Hashed, path)
            yield FileState(values.path, values.size, values.mtime_ns, values.inode), values.sha256


def complete_lines(path: Path, own: bool = False) -> list[bytes]:
    """Return the lines of a file that end in a newline; [] if it cannot be read. own: [] for another user's file too."""
    try:
        with open(open_own(path, os.O_RDONLY), "rb") if own else user_files.open_file(path) as file:
            return list(small_files.whole_lines(file, path))
    except (OSError, RecipeError):
        return []


@dataclass(frozen=True)
class _Hashed(FileState):
    """A line of a file of hashes."""

    sha256: str


def append_hash(path: Path, state: FileState, digest: str) -> None:
    """Add a line to a file of hashes. Raises OSError."""
    with open(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
        file.write(json.dumps(asdict(state) | {"sha256": digest}) + "\n")


def rewritten(before: FileState, now: FileState, old_hash: str = "", new_hash: str = "") -> str:
    """Return the warning that a file's content differs from that at an earlier start of the run.

    old_hash, new_hash: SHA-256 in hex, "" if unknown.
    """

    def description(state: FileState, digest: str) -> str:
        changed = datetime.fromtimestamp(state.mtime_ns / 1e9).isoformat(" ", "seconds")
        return f"{state.size:,} bytes, last changed {changed}{f', SHA-256 {digest[:16]}' if digest else ''}"

    return (
        f"{now.path} was rewritten since an earlier start of this run: it had {description(before, old_hash)}; now it has"
        f" {description(now, new_hash)}. Steps before and after the change do not use the same content"
    )
