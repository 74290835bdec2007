"""Compute the SHA-256 of files, and list those of a folder. `pipeline/checkpoints/verification.py` compares them.

`digests.sha256` lists the digests of a folder's files in the format of `sha256sum`, so that `sha256sum -c digests.sha256` in
the folder checks them too. A digest is of the bytes on disk, so the digest of an encrypted file can be checked without its key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.files.storage import sync, write_durably
from pipeline.recipe import user_files

MANIFEST = "digests.sha256"
ORIGIN = "lineage.json"
"""Name of the file with the origin of a checkpoint or an export. An export's list leaves it out, since it has hashes itself."""
LONGEST = 64 << 20
"""Maximum number of bytes of a list. It is enough for half a million files."""
BLOCK = 8 << 20
READERS = 4
"""Files that one process hashes at a time."""
NOT_OURS = (".nfs",)
"""Prefixes of names that file systems make: NFS gives such a name to a removed file that is still open."""


class Stopped(Exception):
    """Raised if hashing was asked to stop."""


def sha256(path: Path, stop: Callable[[], bool] = lambda: False) -> str:
    """Return the SHA-256 of a file's content, in hex. Raises OSError.

    stop: a function called between blocks; Stopped is raised if it returns True.
    """
    digest = hashlib.sha256()
    with user_files.open_file(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if stop():
                raise Stopped
    return digest.hexdigest()


def of_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return path within the folder -> SHA-256 of the file. Reads several files at a time. Raises OSError."""
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(lambda name: sha256(folder / name), names), strict=True))


def names_in(folder: Path) -> list[str]:
    """Return the sorted paths of all files and links within a folder, without names that begin as in NOT_OURS."""
    names = []
    for root, folders, files in os.walk(folder):  # lists folders without a look at each file
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files + links if not name.startswith(NOT_OURS)]
    return sorted(names)


def write_manifest(folder: Path, digests: Mapping[str, str]) -> str:
    """Write `digests.sha256`, wait until it is on disk, and return its own digest. Raises OSError."""
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    write_durably(folder / MANIFEST, text)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> tuple[dict[str, str], str]:
    """Return (path within the folder -> digest, digest of the list itself). Raises OSError, and ValueError for another form."""
    with user_files.open_file(folder / MANIFEST) as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise ValueError(f"{folder / MANIFEST}: got more than {LONGEST:,} bytes; expected a list of files")
    text, digests = content.decode(errors="replace"), {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        digest, mark, name = line.partition("  ")
        if len(digest) != 64 or not mark or not name:
            raise ValueError(f"{folder / MANIFEST}: line {number}: got {line[:80]!r}; expected a digest and a name")
        digests[name] = digest
    return digests, hashlib.sha256(content).hexdigest()


def add_manifest(folder: Path, known: Mapping[str, str], left_out: Sequence[str] = ()) -> dict[str, str]:
    """Write `digests.sha256` for a folder whose files are complete. Return name -> digest, with the list's own digest too.

    known: name -> digest, computed when the file was written; all other files are read. left_out: names of files without a
    digest, since they may change.
    """
    names = [name for name in names_in(folder) if name not in (MANIFEST, *left_out)]
    digests = of_files(folder, [name for name in names if name not in known])
    digests |= {name: digest for name, digest in known.items() if name in names}
    manifest = write_manifest(folder, digests)
    sync(folder)
    return digests | {MANIFEST: manifest}
