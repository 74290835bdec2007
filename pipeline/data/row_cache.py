"""Keep converted data files on disk, so that their records can be read in any order.

A compressed text is decompressed, and large Parquet files become uncompressed Arrow files, which are memory-mapped. They lie in
`HF_DATASETS_CACHE/hetstep`, beside what `datasets` converts in the same way. Nothing deletes them but the user. A file that
changes is converted anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

VERSION = 1  # of what this module and its callers write


def folder() -> Path:
    """Return the folder of converted files."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets").expanduser() / "hetstep"


def cached(path: Path, part: str, write: Callable[[Path], None]) -> Path:
    """Return the converted file of a data file, which `write` writes unless an earlier run did.

    part: the name of the part of the data file that is converted. write: writes it into a new path. Raises OSError, which names
    the folder if it cannot hold the file.
    """
    state = os.stat(path)
    identity = f"{VERSION}\n{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{part}"
    to = folder() / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if to.exists():
        return to
    new = to.with_name(f"{to.name}.{os.uname().nodename}.{os.getpid()}")
    logger.info("%s: converting %s for access to single records, into %s", path, part, to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        write(new)
        os.replace(new, to)
    except OSError as error:
        if error.filename == str(path):
            raise
        reason = f"{error.strerror or error}. Try HF_DATASETS_CACHE=FOLDER with room for the uncompressed data"
        raise OSError(error.errno, f"cannot convert {path}: {reason}", str(to.parent)) from None
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return to
