"""The conversions of one checkpoint, side by side in a folder that jobs share: one job writes at a time, any number read.

    <shared folder>/
      <16 hex digits>.lock              held while this checkpoint is converted; says by whom
      <model's name>-<16 hex digits>/   the digits are of the checkpoint's fingerprint, the name is whose came first
        000001/                         complete: renamed only after everything in it was on disk; the highest number counts
          complete.json                 names, shapes, and the size of every file; locked by all who read
          rank00000.safetensors ...     whole Megatron parameters
        .000002.<attempt>.partial/      being written, or left by a job that died; never read

Both locks are the kernel's, so that a process that dies leaves none. The first is POSIX's (fcntl), which children do not
inherit; the second is flock's, since any close of a file drops all POSIX locks that the process has on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
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
from pipeline.checkpoint import COMPLETE
from pipeline.storage import sync, write_durably
from pipeline.train.megatron.safetensors_files import stored_tensors
from pipeline.train.shards import BoxReader

VARIABLE = "HETSTEP_MEGATRON_CHECKPOINT_DIR"


class Conversion:
    """A complete conversion. While this object lives, no job removes it."""

    def __init__(self, folder: Path):
        """Raises FileNotFoundError if it is not there, or no longer; ValueError if its files are not of the sizes written."""
        self.folder = folder
        self._in_use = open(folder / COMPLETE)  # noqa: SIM115 - it stays open
        _flock(self._in_use, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(self._in_use.fileno()), os.stat(folder / COMPLETE)):
            raise FileNotFoundError(f"{folder} was replaced")
        record = json.load(self._in_use)
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
        if sizes != record["files"]:
            raise ValueError(f"{folder}: the sizes of its files are not those in {COMPLETE}")
        self._reader = BoxReader()
        for name, entry in record["tensors"].items():
            shape = tuple(entry["shape"])
            self._reader.add(name, shape, folder / entry["file"], whole(shape))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """That box of a whole Megatron parameter, on the CPU, in the dtype that the checkpoint has."""
        return self._reader.read(name, box)


class ConversionCache:
    """All conversions of one checkpoint. One rank of a job manages them: it finds one, or writes one alone."""

    def __init__(self, root: Path, model_name: str, fingerprint: str):
        self._root = root
        self._name = _slug(model_name)
        self._fingerprint = fingerprint
        self._found: Conversion | None = None  # not to be removed before this job's other ranks have opened it

    @property
    def _folder(self) -> Path:
        short = self._fingerprint[:16]
        same = sorted(self._root.glob(f"*-{short}"))  # another job may have come first, with another name for it
        return same[0] if same else self._root / f"{self._name}-{short}"

    def find(self) -> str | None:
        """The folder of the newest complete conversion."""
        for folder in reversed(self._numbered()):
            try:
                self._found = Conversion(folder)
            except (FileNotFoundError, ValueError) as error:
                print(f"not used: {error}", flush=True)
                continue
            return str(folder)
        return None

    @contextlib.contextmanager
    def lock(self, timeout_s: float) -> Iterator[None]:
        """Wait until no other job converts this checkpoint, and keep others waiting.

        Raises TimeoutError, naming the other job, after `timeout_s` seconds; ValueError if the file system has no locks.
        """
        deadline, told = time.monotonic() + timeout_s, False
        lock = self._root / f"{self._fingerprint[:16]}.lock"
        with open(lock, "a+") as file:
            while not _taken(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{lock}: still held after {timeout_s:g} s by {_holder(file)}")
                if not told:
                    print(f"waiting for {_holder(file)}, which converts the same checkpoint ({lock})", flush=True)
                    told = True
                time.sleep(0.2)
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T %z")}))
            file.flush()
            yield

    def begin(self) -> str:
        """An empty folder to write into. What dead jobs left is removed, as no live one writes here now."""
        self._folder.mkdir(exist_ok=True)
        for folder in self._folder.glob(".*"):
            _remove(folder)
        number = max((int(folder.name) for folder in self._numbered()), default=0) + 1
        partial = self._folder / f".{number:06d}.{socket.gethostname()}-{os.getpid()}-{time.time_ns()}.partial"
        partial.mkdir()
        sync(self._folder)
        print(f"converting the checkpoint for Megatron-Core, in {self._folder}", flush=True)
        return str(partial)

    def commit(self, partial: Path, names: Set[str]) -> str:
        """The files in `partial`, with the tensors `names`, are on disk: make them a conversion, and drop older ones."""
        files = sorted(partial.glob("*.safetensors"))
        tensors = {
            name: {"shape": stored.shape, "dtype": str(stored.dtype).removeprefix("torch."), "file": file.name}
            for file in files
            for name, stored in stored_tensors(file).items()
        }
        if tensors.keys() != names:
            raise AssertionError(f"{partial}: these are not what was to be written: {sorted(tensors.keys() ^ names)[:4]}")
        sizes = {file.name: file.stat().st_size for file in files}
        write_durably(partial / COMPLETE, json.dumps({"fingerprint": self._fingerprint, "files": sizes, "tensors": tensors}))
        sync(partial)
        folder = self._folder / partial.name.split(".")[1]
        partial.rename(folder)
        sync(self._folder)
        self._found = Conversion(folder)
        for other in self._numbered():
            if other != folder:
                _remove_unless_read(other)
        return str(folder)

    def _numbered(self) -> list[Path]:
        """Asked by listing the folder, since an NFS client caches that a single name does not exist."""
        return sorted(folder for folder in self._folder.glob("*") if re.fullmatch(r"\d{6}", folder.name))


def unusable_folder(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{folder}: Megatron checkpoints cannot be kept here ({error.strerror});"
        f" set {VARIABLE} to a folder that all train nodes share, can write and can lock files in"
    )


def _slug(model_name: str) -> str:
    name = Path(model_name).resolve().name if Path(model_name).is_dir() else model_name
    return re.sub(r"[^A-Za-z0-9._-]+", "--", name)[:80]


def _taken(file: TextIOWrapper) -> bool:
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
    except json.JSONDecodeError:  # it has the lock and is about to write who it is
        return "another job"
    return f"process {holder['pid']} on {holder['host']} since {holder['since']}"


def _remove_unless_read(folder: Path) -> None:
    try:
        file = open(folder / COMPLETE, "r+")  # noqa: SIM115 - an exclusive lock needs one that can be written
    except FileNotFoundError:
        _remove(folder)
        return
    with file:
        try:
            _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder} is still being read; the next conversion of this checkpoint removes it", flush=True)
            return
        _remove(folder)


def _remove(folder: Path) -> None:
    """Under another name first: a rank that outlives its job for a moment then finds no folder to write into."""
    gone = folder.with_name(f".{time.time_ns()}.removed")
    folder.rename(gone)
    try:
        shutil.rmtree(gone)
    except OSError as error:  # NFS keeps files that another process has open
        print(f"{gone} could not be removed ({error}); the next conversion of this checkpoint tries again", flush=True)
