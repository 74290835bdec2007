"""The cache of converted checkpoints in a folder that jobs share: one job writes at a time, any number read.

The folder is HETSTEP_MEGATRON_CHECKPOINT_DIR, else NRL_MEGATRON_CHECKPOINT_DIR, else $HF_HOME/hetstep.

    <shared folder>/
      <16 hex digits>.lock              locked while this checkpoint is converted; contains the process
      <model's name>-<16 hex digits>/   digits: of the checkpoint's fingerprint; name: of the first job's model
        000001/                         complete: renamed after all its files are on disk; the highest number is current
          complete.json                 names, shapes, and the size of every file; locked by all readers
          rank00000.safetensors ...     whole Megatron parameters
        .000002.<attempt>.partial/      incomplete: being written, or left by a killed job; never read

The kernel releases both locks when a process ends. The first is a POSIX lock (fcntl), which child processes do not inherit. The
second is a flock, because any close of a file releases all POSIX locks that the process has on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Set
from io import TextIOWrapper
from pathlib import Path

import torch

from pipeline.boxes import Box, whole
from pipeline.checkpoints.checkpoint import COMPLETE
from pipeline.config import Problem, RecipeError
from pipeline.files.storage import sync, write_durably
from pipeline.models.weight_files import read_header
from pipeline.train.shards import BoxReader
from pipeline.train.tensor_files import DTYPES

logger = logging.getLogger(__name__)

VARIABLE = "HETSTEP_MEGATRON_CHECKPOINT_DIR"


class Conversion:
    """A complete conversion. No job removes it while this object exists."""

    def __init__(self, folder: Path):
        """Raises FileNotFoundError if the folder does not exist or was replaced, ValueError if its files have other sizes."""
        self.folder = folder
        self._in_use = open(folder / COMPLETE)  # noqa: SIM115 - it stays open
        _flock(self._in_use, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(self._in_use.fileno()), os.stat(folder / COMPLETE)):
            raise FileNotFoundError(f"{folder} was replaced")
        record = json.load(self._in_use)
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
        if sizes != record["files"]:
            raise ValueError(f"{folder}: its files have other sizes than in {COMPLETE}")
        self._reader = BoxReader()
        for name, entry in record["tensors"].items():
            shape = tuple(entry["shape"])
            self._reader.add(name, shape, folder / entry["file"], whole(shape))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a whole Megatron parameter, on the CPU, in the checkpoint's dtype."""
        return self._reader.read(name, box)


class ConversionCache:
    """The cached conversions of one checkpoint. One rank of each job finds a conversion, or writes one under a lock."""

    def __init__(self, root: Path, model_name: str, fingerprint: str):
        self._root = root
        self._name = _slug(model_name)
        self._fingerprint = fingerprint
        self._found: Conversion | None = None  # locked until this job's other ranks have opened it

    @property
    def _folder(self) -> Path:
        short = self._fingerprint[:16]
        existing = sorted(self._root.glob(f"*-{short}"))  # another job may have created it under another name
        return existing[0] if existing else self._root / f"{self._name}-{short}"

    def find(self) -> str | None:
        """Return the folder of the newest complete conversion; None if there is none."""
        for folder in reversed(self._complete_folders()):
            try:
                self._found = Conversion(folder)
            except (FileNotFoundError, ValueError) as error:
                logger.warning("conversion not used: %s", error)
                continue
            return str(folder)
        return None

    @contextlib.contextmanager
    def lock(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock of this checkpoint, so that no other job converts it.

        Raises TimeoutError, which names the other job, after `timeout_s` seconds, RecipeError if the file system has no locks.
        """
        deadline, logged = time.monotonic() + timeout_s, False
        lock = self._root / f"{self._fingerprint[:16]}.lock"
        with open(lock, "a+") as file:
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{lock}: still held after {timeout_s:g} s by {_holder(file)}")
                if not logged:
                    logger.info("waiting for %s, which converts the same checkpoint (%s)", _holder(file), lock)
                    logged = True
                time.sleep(0.2)
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T %z")}))
            file.flush()
            yield

    def begin(self) -> str:
        """Create an empty folder for a conversion and return it. Call it under the lock: it removes killed jobs' folders."""
        self._folder.mkdir(exist_ok=True)
        for folder in self._folder.glob(".*"):
            _remove(folder)
        number = max((int(folder.name) for folder in self._complete_folders()), default=0) + 1
        partial = self._folder / f".{number:06d}.{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.partial"
        partial.mkdir()
        sync(self._folder)
        logger.info("converting the checkpoint for Megatron-Core, in %s", self._folder)
        return str(partial)

    def commit(self, partial: Path, names: Set[str]) -> str:
        """Turn `partial` into a complete conversion, remove older ones, and return its folder.

        names: the tensors that its files must contain. All files must be on disk.
        """
        files = sorted(partial.glob("*.safetensors"))
        tensors = {
            name: {"shape": stored.shape, "dtype": str(DTYPES[stored.dtype]).removeprefix("torch."), "file": file.name}
            for file in files
            for name, stored in read_header(file).items()
        }
        if tensors.keys() != names:
            raise AssertionError(f"{partial}: missing or unexpected tensors: {sorted(tensors.keys() ^ names)[:4]}")
        sizes = {file.name: file.stat().st_size for file in files}
        write_durably(partial / COMPLETE, json.dumps({"fingerprint": self._fingerprint, "files": sizes, "tensors": tensors}))
        sync(partial)
        folder = self._folder / partial.name.split(".")[1]
        partial.rename(folder)
        sync(self._folder)
        self._found = Conversion(folder)
        for complete in self._complete_folders():
            if complete != folder:
                _remove_unless_read(complete)
        return str(folder)

    def _complete_folders(self) -> list[Path]:
        """Return complete conversions in order. The folder is listed because NFS clients cache that a name does not exist."""
        return sorted(folder for folder in self._folder.glob("*") if re.fullmatch(r"\d{6}", folder.name))


def unusable_folder(folder: Path, error: OSError) -> RecipeError:
    """Return the error for a folder that cannot hold conversions."""
    message = f"got {folder} ({error.strerror}); expected a folder that all train nodes share, can write and can lock files in"
    return RecipeError(Problem(VARIABLE, "unwritable", message))


def _slug(model_name: str) -> str:
    name = Path(model_name).resolve().name if Path(model_name).is_dir() else model_name
    return re.sub(r"[^A-Za-z0-9._-]+", "--", name)[:80]


def _try_lock(file: TextIOWrapper) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise unusable_folder(Path(file.name), error) from error
    return True


def _flock(file: TextIOWrapper, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        raise unusable_folder(Path(file.name), error) from error


def _holder(file: TextIOWrapper) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except json.JSONDecodeError:  # it has the lock and has not yet written its name
        return "another job"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _remove_unless_read(folder: Path) -> None:
    try:
        file = open(folder / COMPLETE, "r+")  # noqa: SIM115 - an exclusive lock needs a writable file
    except FileNotFoundError:
        _remove(folder)
        return
    with file:
        try:
            _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s is still being read; the next conversion of this checkpoint removes it", folder)
            return
        _remove(folder)


def _remove(folder: Path) -> None:
    """Rename the folder and remove it, so that a rank that outlives its job cannot write into it."""
    gone = folder.with_name(f".{time.time_ns()}.removed")
    folder.rename(gone)
    try:
        shutil.rmtree(gone)
    except OSError as error:  # NFS keeps files that another process has open
        logger.warning("%s could not be removed (%s); the next conversion of this checkpoint tries again", gone, error)
