"""Record what a run is made from, and hash it while the run goes on.

    lineage/run.json         the run's id, made with its first submission
    lineage/inputs.json      the files that its submissions name: models, data, images; written by launch/ancestry/inputs.py
    lineage/hashes.jsonl     the SHA-256 of each of these files, by a thread of rank 0's process
    lineage/exports.jsonl    a line for each export, written by launch/export.py
    checkpoints/step_000010/lineage.json, and hf/lineage.json in it: which run and step they are of

Files of 100 GB take minutes to read, so a submission only lists them, and the job hashes them beside its work, at the lowest
priority. Hashes are kept for other runs too, in a file of the user beside the run folders, by path, size, time of modification
and inode. A hash of a file is absent until that thread has read it; what was hashed stays if a run ends earlier.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline import user_files
from pipeline.storage import open_own, write_durably

logger = logging.getLogger(__name__)

FOLDER, RUN, INPUTS, HASHES, EXPORTS = "lineage", "run.json", "inputs.json", "hashes.jsonl", "exports.jsonl"
MARK = "lineage.json"
"""In a checkpoint and beside an exported model: where it comes from."""
KINDS = ("checkpoint", "export")
"""Values of `kind` in it."""
BLOCK = 1 << 23
MOST_FILES = 10_000
"""Files of one input that are listed; of a larger folder the first ones by name."""
END_S = 60.0
"""How long a complete run waits at its end for hashes that are still computed."""


@dataclass(frozen=True)
class FileState:
    """A file as it was seen: another content has another state, unless somebody sets the time back."""

    path: str  # absolute
    size: int  # bytes
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of a file, that of the target of a link. Raises OSError."""
        status = path.stat()
        return cls(str(path), status.st_size, status.st_mtime_ns, status.st_ino)


class HashCache:
    """Hashes of files by their state, in a file that grows by a line for each. Another user's file is not read."""

    def __init__(self, path: Path | None):
        """Open the cache at a path. None: a cache that is empty and keeps nothing."""
        self._path = path
        self._known: dict[FileState, str] = {}
        if path is not None:
            self._known = dict(read_hashes(path, own=True))

    def get(self, state: FileState) -> str | None:
        """Return the SHA-256 of a file in this state, in hex; None if it is unknown."""
        return self._known.get(state)

    def sha256(self, path: Path, stop: Callable[[], bool] = lambda: False) -> tuple[FileState, str]:
        """Return the state and the SHA-256 of a file. stop: asked between blocks; true raises Stopped. Raises OSError."""
        while True:
            state = FileState.of(path)
            if known := self.get(state):
                return state, known
            own = sha256(path, stop)
            if FileState.of(path) == state:  # else it was written meanwhile
                break
        self.add(state, own)
        return state, own

    def add(self, state: FileState, own: str) -> None:
        """Keep the SHA-256 of a file in this state."""
        self._known[state] = own
        if self._path is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
                append_hash(self._path, state, own)


class Stopped(Exception):
    """Hashing was asked to stop."""


def sha256(path: Path, stop: Callable[[], bool] = lambda: False) -> str:
    """Return the SHA-256 of a file's content, in hex. stop: asked between blocks; true raises Stopped. Raises OSError."""
    found = hashlib.sha256()
    with user_files.open_file(path) as file:
        while block := file.read(BLOCK):
            found.update(block)
            if stop():
                raise Stopped
    return found.hexdigest()


def read_hashes(path: Path, own: bool = False) -> Iterator[tuple[FileState, str]]:
    """Yield (state, SHA-256) of each line of a file of hashes; nothing if this user may not read it.

    Lines that two writers have mixed are left out. own: read nothing from a file of another user, who could have put wrong
    hashes there.
    """
    try:
        with open(open_own(path, os.O_RDONLY) if own else path, "rb") as file:
            found = list(_complete_lines(file.read()))
    except OSError:  # there is none, or it is another user's
        return
    for values in found:
        with contextlib.suppress(KeyError):
            yield FileState(values["path"], values["size"], values["mtime_ns"], values["inode"]), values["sha256"]


def _complete_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line that has its end. Lines that are none are left out."""
    for line in content.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            if isinstance(values := json.loads(line), dict):
                yield values


def append_hash(path: Path, state: FileState, own: str) -> None:
    """Add a line to a file of hashes. Raises OSError."""
    with open(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
        file.write(json.dumps(asdict(state) | {"sha256": own}) + "\n")


# ---- what an input is ---------------------------------------------------------------------------------------------------


def found(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of inputs.json with its files and its origin, if its path is there by now.

    files: a state for each, none of a checkpoint, whose identity is its lineage.json. origin: as `origin_of` returns it.
    """
    path = Path(entry["path"]) if entry["path"] else None
    if entry["files"] or entry["origin"] or path is None or not path.exists():
        return entry
    files = [] if entry["role"] == "checkpoint" else [asdict(each) for each in states(path)]
    return entry | {"files": files, "origin": origin_of(path)}


def states(path: Path) -> list[FileState]:
    """Return the state of a file, or of each file below a folder by name, without hidden ones. At most MOST_FILES."""
    if path.is_file():
        return [FileState.of(path)]
    found: list[FileState] = []
    for folder, below, names in os.walk(path, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or name == MARK:
                continue
            with contextlib.suppress(OSError):  # a broken link
                found.append(FileState.of(Path(folder) / name))
            if len(found) == MOST_FILES:
                return found
    return found


def origin_of(path: Path) -> dict[str, Any] | None:
    """Return where a model or a checkpoint comes from: the contents of its lineage.json, or of the checkpoint that holds it.

    A checkpoint of an earlier version has none; it is known by its path alone: {"kind": "checkpoint", "path", "step"}. Files of
    other programs with this name do not count.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *list(real.parents)[:2]):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((folder / MARK).read_text())
            if isinstance(found, dict) and found.get("kind") in KINDS:
                return found
        with contextlib.suppress(OSError, ValueError, KeyError):
            return {
                "kind": "checkpoint",
                "path": str(folder),
                "step": json.loads((folder / "complete.json").read_text())["step"],
            }
    return None


# ---- a run --------------------------------------------------------------------------------------------------------------


def begin(run_dir: Path) -> str:
    """Return the run's id; make it before the first submission. Raises OSError."""
    if (found := run_id(run_dir)) is None:
        found = uuid.uuid4().hex
        (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        write_durably(run_dir / FOLDER / RUN, json.dumps({"id": found}) + "\n")
    return found


def run_id(run_dir: Path) -> str | None:
    """Return a run's id; None for a run of an earlier version."""
    try:
        return json.loads((run_dir / FOLDER / RUN).read_text())["id"]
    except (OSError, ValueError, KeyError):
        return None


def read_inputs(run_dir: Path) -> dict[str, Any]:
    """Return inputs.json: {"cache": path or None, "inputs": [...]}; {} for a run of an earlier version."""
    try:
        return json.loads((run_dir / FOLDER / INPUTS).read_text())
    except (OSError, ValueError):
        return {}


def files_of(entry: dict[str, Any]) -> list[FileState]:
    """Return the files of an entry of inputs.json, as its submission saw them."""
    return [FileState(**values) for values in entry["files"]]


def exports_of(run_dir: Path) -> Path:
    """Return the path of a run's exports.jsonl, which may not exist."""
    return run_dir / FOLDER / EXPORTS


def read_exports(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's exports.jsonl, oldest first, without those that are incomplete; none if it cannot be read.

    path: of the export; within the run's folder if it is there, even if the folder was moved since.
    """
    try:
        content = exports_of(run_dir).read_bytes()
    except (OSError, ValueError):
        return
    for line in _complete_lines(content):
        yield line | {"path": str(run_dir / line["path"])} if isinstance(line.get("path"), str) else line


def mark_checkpoint(partial: Path, run_dir: Path, step: int, attempt: str) -> None:
    """Write which run and step a checkpoint is of, into it and into the model in it. Nothing for a run without an id."""
    run = run_id(run_dir)
    if run is None:
        return
    own = hashlib.sha256(f"{run} {step} {attempt}".encode()).hexdigest()[:32]
    record = {"kind": "checkpoint", "id": own, "run": {"id": run, "name": run_dir.name}, "step": step, "attempt": attempt}
    for folder in (partial, partial / "hf"):
        if folder.is_dir():
            write_durably(folder / MARK, json.dumps(record, indent=1) + "\n")


class Hashing:
    """A thread that hashes the inputs of a run, once each."""

    def __init__(self, run_dir: Path):
        """Take the run's folder."""
        self._run_dir = run_dir
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lineage", daemon=True)

    def start(self) -> None:
        """Begin to hash, unless the run is of an earlier version."""
        self._thread.start()

    def finish(self, wait_s: float) -> None:
        """Wait until everything is hashed, at most `wait_s`, and stop."""
        self._thread.join(wait_s)
        self._stopping.set()
        if self._thread.is_alive():
            logger.warning("lineage: not all inputs are hashed after %g s; the next start of the run goes on", wait_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for message in hash_inputs(self._run_dir, self._stopping.is_set):
                logger.warning("lineage: %s", message)
        except (Stopped, OSError, ValueError) as error:
            logger.warning("lineage: the inputs of this run are not all hashed: %s", error)


def hash_inputs(run_dir: Path, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
    """Hash the inputs that have no hash yet, into hashes.jsonl; yield a message for each that cannot be hashed as it was.

    stop: asked between blocks; true raises Stopped.
    """
    known = read_inputs(run_dir)
    complete = [found(entry) for entry in known.get("inputs", ())]
    if complete != known.get("inputs", []):
        known["inputs"] = complete
        write_durably(run_dir / FOLDER / INPUTS, json.dumps(known, indent=1) + "\n")
    cache = HashCache(Path(known["cache"]) if known.get("cache") else None)
    path = run_dir / FOLDER / HASHES
    done = {state for state, _ in read_hashes(path)}
    for given in dict.fromkeys(state for entry in known.get("inputs", ()) for state in files_of(entry)):
        if given in done:
            continue
        try:
            state, own = cache.sha256(Path(given.path), stop)
        except FileNotFoundError:
            logger.info(
                "lineage: %s cannot be seen from here, and is not hashed", given.path
            )  # such as the image of a container
            continue
        except OSError as error:
            yield f"{given.path} cannot be read here: {error.strerror}"
            continue
        if state != given:
            yield f"{given.path} is not as it was at the submission, so what it was is unknown"
        append_hash(path, state, own)
