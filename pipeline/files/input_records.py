"""Record what a run is made from, and hash it while the run goes on.

    lineage/run.json         the run's id, made with its first submission
    lineage/inputs.json      the files that its submissions name: models, data, images; written by launch/governance/inputs.py
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
from datetime import datetime
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pipeline.files import digests, small_files
from pipeline.files.storage import open_own
from pipeline.recipe import user_files
from pipeline.recipe.problems import RecipeError
from pipeline.seams.job_events import JobObserver

logger = logging.getLogger(__name__)

FOLDER, RUN, INPUTS, HASHES, EXPORTS = "lineage", "run.json", "inputs.json", "hashes.jsonl", "exports.jsonl"
MARK = digests.ORIGIN
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


class InputEntry(TypedDict):
    """An entry of inputs.json; launch/governance/inputs.py describes it."""

    key: str
    role: str
    name: str
    path: str | None
    origin: dict[str, Any] | None  # as `origin_of` returns it
    files: list[FileState]  # as plain values
    arguments: NotRequired[dict[str, Any] | None]


class Inputs(TypedDict, total=False):
    """inputs.json; empty for a run of an earlier version."""

    cache: str | None
    inputs: list[InputEntry]


class InputOrigin(TypedDict):
    """An input of a run, as the lineage.json of an export names it."""

    key: str
    role: str
    name: str
    files: dict[str, str | None]  # name -> SHA-256
    origin: dict[str, Any] | None


class RunOrigin(TypedDict):
    """The run that made a checkpoint or an export, in a lineage.json."""

    id: str
    name: str
    algorithm: NotRequired[str]
    git: NotRequired[dict[str, Any] | None]
    recipe: NotRequired[str | None]
    inputs: NotRequired[list[InputOrigin]]


class CheckpointOrigin(TypedDict):
    """The lineage.json of a checkpoint; of one of an earlier version only its path is known."""

    kind: str
    step: int
    id: NotRequired[str | None]
    path: NotRequired[str]
    run: NotRequired[RunOrigin]


class ExportOrigin(TypedDict):
    """The lineage.json of an export."""

    kind: str
    id: str
    step: int
    files: dict[str, str]  # name -> SHA-256
    checkpoint: CheckpointOrigin
    run: RunOrigin
    format: NotRequired[str]


class ExportLine(TypedDict):
    """A line of exports.jsonl. The checkpoint has no kind."""

    id: str
    step: int
    path: str
    files: dict[str, str]
    checkpoint: dict[str, Any]


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
    for line in _complete_lines(path, own):
        with contextlib.suppress(RecipeError):
            values = small_files.parsed(line, _Hashed, path)
            yield FileState(values.path, values.size, values.mtime_ns, values.inode), values.sha256


def _complete_lines(path: Path, own: bool = False) -> list[bytes]:
    """Return the lines of a file that have their end; none if it cannot be read. own: nor if it is another user's."""
    try:
        with open(open_own(path, os.O_RDONLY), "rb") if own else user_files.open_file(path) as file:
            return list(small_files.whole_lines(file, path))
    except (OSError, RecipeError):
        return []


@dataclass(frozen=True)
class _Hashed(FileState):
    """A line of a file of hashes."""

    sha256: str


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
        with contextlib.suppress(OSError):
            if found := read_origin(folder):
                return found
        with contextlib.suppress(OSError, RecipeError):
            if step := small_files.read(folder / "complete.json", _Step):
                return {"kind": "checkpoint", "path": str(folder), "step": step.step}
    return None


@dataclass(frozen=True)
class _Step:
    step: int


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Return the contents of a folder's lineage.json; None if it has none, or one of another program.

    Raises RecipeError for one of ours that is damaged, and OSError.
    """
    try:
        found = small_files.read(folder / MARK, dict[str, Any])
    except RecipeError:
        return None
    if found is None or found.get("kind") not in KINDS:
        return None
    return check_origin(found, folder / MARK)


def check_origin(found: dict[str, Any], where: object) -> dict[str, Any]:
    """Return the contents of a lineage.json. Raises RecipeError if they are not as this package writes them."""
    small_files.checked(found, ExportOrigin if found.get("kind") == "export" else CheckpointOrigin, where)
    if "run" not in found and "path" not in found:
        raise small_files.damaged(where, "neither `run` nor `path`", "one of them")
    for entry in found.get("run", {}).get("inputs", ()):
        if entry["origin"]:
            check_origin(entry["origin"], where)
    return found


# ---- a run --------------------------------------------------------------------------------------------------------------


def begin(run_dir: Path) -> str:
    """Return the run's id; make it before the first submission. Raises OSError."""
    if (found := run_id(run_dir)) is None:
        found = uuid.uuid4().hex
        (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        small_files.write(run_dir / FOLDER / RUN, {"id": found})
    return found


def run_id(run_dir: Path) -> str | None:
    """Return a run's id; None for a run of an earlier version."""
    found = small_files.read(run_dir / FOLDER / RUN, _RunId)
    return found.id if found else None


@dataclass(frozen=True)
class _RunId:
    id: str


def read_inputs(run_dir: Path) -> dict[str, Any]:
    """Return inputs.json; {} for a run of an earlier version. Raises RecipeError for a damaged file."""
    path = run_dir / FOLDER / INPUTS
    found = small_files.read(path, Inputs) or Inputs()
    for entry in found.get("inputs", ()):
        if entry["origin"]:
            check_origin(entry["origin"], path)
    return dict(found)


def files_of(entry: dict[str, Any]) -> list[FileState]:
    """Return the files of an entry of inputs.json, as its submission saw them."""
    return [FileState(**values) for values in entry["files"]]


def exports_of(run_dir: Path) -> Path:
    """Return the path of a run's exports.jsonl, which may not exist."""
    return run_dir / FOLDER / EXPORTS


def read_exports(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's exports.jsonl, oldest first, without those that are damaged; none if it cannot be read.

    path: of the export; within the run's folder if it is there, even if the folder was moved since.
    """
    path = exports_of(run_dir)
    for line in _complete_lines(path):
        with contextlib.suppress(RecipeError):
            values = small_files.parsed(line, ExportLine, path)
            yield {**values, "path": str(run_dir / values["path"])}


def mark_checkpoint(partial: Path, run_dir: Path, step: int, attempt: str) -> None:
    """Write which run and step a checkpoint is of, into it and into the model in it. Nothing for a run without an id."""
    run = run_id(run_dir)
    if run is None:
        return
    own = hashlib.sha256(f"{run} {step} {attempt}".encode()).hexdigest()[:32]
    record = {"kind": "checkpoint", "id": own, "run": {"id": run, "name": run_dir.name}, "step": step, "attempt": attempt}
    for folder in (partial, partial / "hf"):
        if folder.is_dir():
            small_files.write(folder / MARK, record)


class LineageObserver(JobObserver):
    """Marks checkpoints, and hashes the inputs of the run that rank 0's process coordinates."""

    def __init__(self) -> None:
        """Nothing is hashed yet."""
        self._hashing: Hashing | None = None

    def started(self, run_dir: Path) -> None:
        """Begin to hash, in a thread."""
        self._hashing = Hashing(run_dir)
        self._hashing.start()

    def ended(self, run_dir: Path) -> None:
        """Wait until everything is hashed, at most END_S, if the run is complete; else time is short."""
        if self._hashing:
            self._hashing.finish(END_S if (run_dir / "done.json").exists() else 0.0)

    def checkpoint_written(self, partial: Path, run_dir: Path, step: int, attempt: str) -> None:
        """Mark the checkpoint. Raises OSError."""
        mark_checkpoint(partial, run_dir, step, attempt)


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
        small_files.write(run_dir / FOLDER / INPUTS, known)
    cache = HashCache(Path(known["cache"]) if known.get("cache") else None)
    path = run_dir / FOLDER / HASHES
    done = dict(read_hashes(path))
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
        before = [(old, content) for old, content in done.items() if old.path == state.path]
        if before and before[-1][1] != own:
            yield rewritten(before[-1][0], state, before[-1][1], own)
        append_hash(path, state, own)
        done[state] = own


def rewritten(before: FileState, now: FileState, old_hash: str = "", new_hash: str = "") -> str:
    """Return the warning about a file of another content than at an earlier start of the run. Hashes: in hex, "" if unknown."""

    def told(state: FileState, own: str) -> str:
        changed = datetime.fromtimestamp(state.mtime_ns / 1e9).isoformat(" ", "seconds")
        return f"{state.size:,} bytes of {changed}{f', SHA-256 {own[:16]}' if own else ''}"

    return (
        f"{now.path} was rewritten since an earlier start of this run: it had {told(before, old_hash)}; now it has"
        f" {told(now, new_hash)}. Steps before and after do not use the same content"
    )


OBSERVER = LineageObserver()
