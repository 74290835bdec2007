"""Try each writer on each kind of failing file system: what the user sees, and what is kept.

Run with the environment of `disks.Faults`: python -m tests.storage.table DISK, where a small file system is mounted. Prints a
JSON object a line.
"""

import contextlib
import io
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config import RecipeError
from pipeline.files import rank_log
from pipeline.files.storage import StorageError
from tests.storage.disks import Disk, Faults
from tests.storage.writers import WRITERS, Writer

PATIENCE_S = 0.5
SLOW_CALL_S = 0.7  # a writer makes ten such calls or more
FAULTS = ("full", "quota", "read-only", "no permission", "I/O error", "stale handle", "slow")
ERRNO = {"quota": "EDQUOT", "no permission": "EACCES", "I/O error": "EIO", "stale handle": "ESTALE", "read-only": "EROFS"}


@dataclass
class Cell:
    writer: str
    fault: str
    needed: bool
    real: bool  # whether the file system was real; else its calls were made to fail
    error: str  # the error that reached the run
    told: str  # on the log
    kept: str
    seconds: float


@contextlib.contextmanager
def failing(disk: Disk, faults: Faults, fault: str):
    """Yields whether the fault is real."""
    real = fault == "full"
    if fault == "full":
        disk.fill()
    elif fault == "slow":
        faults.set("0", SLOW_CALL_S)
    elif fault == "read-only":
        with contextlib.suppress(subprocess.CalledProcessError):  # a file is open for writing
            disk.remount("ro")
            real = True
    if fault in ERRNO and not real:
        faults.set(ERRNO[fault])
    try:
        yield real
    finally:
        faults.none()
        if fault == "read-only" and real:
            disk.remount("rw")
        disk.free()


def cell(kind: type[Writer], fault: str, disk: Disk, faults: Faults) -> Cell:
    folder = disk.path / f"{kind.__name__}-{fault.replace(' ', '-').replace('/', '')}"
    folder.mkdir()
    begun, error, out = time.monotonic(), "", io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        rank_log.log_to_stderr()
        writer = kind(folder, PATIENCE_S)
        out.truncate(0)
        out.seek(0)
        with failing(disk, faults, fault) as real:
            try:
                writer.write()
            except (StorageError, RecipeError) as raised:
                error = f"{type(raised).__name__}: {raised}"
            told = "\n".join(line for line in out.getvalue().splitlines() if " pid[" in line)
        kept = writer.kept()
    return Cell(kind.__doc__, fault, kind.needed, real, error, told, kept, time.monotonic() - begun)


if __name__ == "__main__":
    disk, faults = Disk(Path(sys.argv[1])), Faults.of_environment()
    for kind in WRITERS:
        for fault in FAULTS:
            print(json.dumps(asdict(cell(kind, fault, disk, faults))), flush=True)
