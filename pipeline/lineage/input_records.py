"""Read and write the records of a run's inputs.

    lineage/run.json         the run's id, made with its first submission
    lineage/inputs.json      the files that its submissions name: models, data, images; written by launch/governance/inputs.py
    lineage/hashes.jsonl     the SHA-256 of each of these files, written by a thread of rank 0's process
    lineage/exports.jsonl    a line for each export, written by launch/export.py
    checkpoints/step_000010/lineage.json, and hf/lineage.json in it: the run and the step of the checkpoint and the model

The contents are checked when they are read, since a record may be damaged or come from another program.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pipeline.files import digests, small_files
from pipeline.lineage.file_hashes import FileState, complete_lines
from pipeline.recipe.problems import RecipeError

FOLDER, RUN, INPUTS, HASHES, EXPORTS = "lineage", "run.json", "inputs.json", "hashes.jsonl", "exports.jsonl"
MARK = digests.ORIGIN
"""Name of the file in a checkpoint, and beside an exported model, that has its origin."""
KINDS = ("checkpoint", "export")
"""Values of `kind` in a lineage.json."""
MOST_FILES = 10_000
"""Maximum number of files of an input that are listed. Of a larger folder, the first files by name are listed."""


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
    """The contents of inputs.json; empty for a run of an earlier version."""

    cache: str | None
    inputs: list[InputEntry]


class InputOrigin(TypedDict):
    """An input of a run, in the form that the lineage.json of an export has."""

    key: str
    role: str
    name: str
    files: dict[str, str | None]  # name -> SHA-256
    origin: dict[str, Any] | None


class RunOrigin(TypedDict):
    """The part of a lineage.json that describes the run that made the checkpoint or the export."""

    id: str
    name: str
    algorithm: NotRequired[str]
    git: NotRequired[dict[str, Any] | None]
    recipe: NotRequired[str | None]
    inputs: NotRequired[list[InputOrigin]]


class CheckpointOrigin(TypedDict):
    """The lineage.json of a checkpoint. For a checkpoint of an earlier version only the path is known."""

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
    """A line of exports.jsonl. Its checkpoint has no key `kind`."""

    id: str
    step: int
    path: str
    files: dict[str, str]
    checkpoint: dict[str, Any]


# ---- what an input is ---------------------------------------------------------------------------------------------------


def complete_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of inputs.json with its files and its origin filled in, if its path exists by now.

    The entry's files: the state of each file; empty for a checkpoint, which its lineage.json identifies, and for an image that
    is a folder. Its origin: the result of `origin_of`.
    """
    path = Path(entry["path"]) if entry["path"] else None
    if entry["files"] or entry["origin"] or path is None or not path.exists():
        return entry
    whole_system = entry["role"] == "image" and path.is_dir()  # a sandbox of Apptainer, whose links form cycles
    files = [] if entry["role"] == "checkpoint" or whole_system else [asdict(state) for state in states(path)]
    return entry | {"files": files, "origin": origin_of(path)}


def states(path: Path) -> list[FileState]:
    """Return the state of a file, or of each file below a folder in the order of names, at most MOST_FILES.

    Hidden files and lineage.json are left out.
    """
    if path.is_file():
        return [FileState.of(path)]
    listed: list[FileState] = []
    for folder, below, names in os.walk(path, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or name == MARK:
                continue
            with contextlib.suppress(OSError):  # a broken link
                listed.append(FileState.of(Path(folder) / name))
            if len(listed) == MOST_FILES:
                return listed
    return listed


def origin_of(path: Path) -> dict[str, Any] | None:
    """Return the origin of a model or a checkpoint: its lineage.json, or that of the checkpoint that contains it, or None.

    A checkpoint of an earlier version has no lineage.json; its origin is {"kind": "checkpoint", "path", "step"}. A lineage.json
    of another program does not count.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *list(real.parents)[:2]):
        with contextlib.suppress(OSError):
            if origin := read_origin(folder):
                return origin
        with contextlib.suppress(OSError, RecipeError):
            if step := small_files.read(folder / "complete.json", _Step):
                return {"kind": "checkpoint", "path": str(folder), "step": step.step}
    return None


@dataclass(frozen=True)
class _Step:
    step: int


def read_origin(folder: Path) -> dict[str, Any] | None:
    """Return the contents of a folder's lineage.json; None if the folder has none, or if another program wrote it.

    Raises RecipeError if this package wrote it and it is damaged, and OSError.
    """
    try:
        origin = small_files.read(folder / MARK, dict[str, Any])
    except RecipeError:
        return None
    if origin is None or origin.get("kind") not in KINDS:
        return None
    return check_origin(origin, folder / MARK)


def check_origin(origin: dict[str, Any], where: object) -> dict[str, Any]:
    """Return `origin`, the contents of a lineage.json. Raises RecipeError if they lack the form that this package writes."""
    small_files.checked(origin, ExportOrigin if origin.get("kind") == "export" else CheckpointOrigin, where)
    if "run" not in origin and "path" not in origin:
        raise small_files.damaged(where, "neither `run` nor `path`", "one of them")
    for entry in origin.get("run", {}).get("inputs", ()):
        if entry["origin"]:
            check_origin(entry["origin"], where)
    return origin


# ---- a run --------------------------------------------------------------------------------------------------------------


def begin(run_dir: Path) -> str:
    """Return the run's id. The first call, before the first submission, makes the id. Raises OSError."""
    if (run := run_id(run_dir)) is None:
        run = uuid.uuid4().hex
        (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
        small_files.write(run_dir / FOLDER / RUN, {"id": run})
    return run


def run_id(run_dir: Path) -> str | None:
    """Return a run's id; None for a run of an earlier version."""
    record = small_files.read(run_dir / FOLDER / RUN, _RunId)
    return record.id if record else None


@dataclass(frozen=True)
class _RunId:
    id: str


def read_inputs(run_dir: Path) -> dict[str, Any]:
    """Return the contents of inputs.json; {} for a run of an earlier version. Raises RecipeError for a damaged file."""
    path = run_dir / FOLDER / INPUTS
    inputs = small_files.read(path, Inputs) or Inputs()
    for entry in inputs.get("inputs", ()):
        if entry["origin"]:
            check_origin(entry["origin"], path)
    return dict(inputs)


def files_of(entry: dict[str, Any]) -> list[FileState]:
    """Return the state of each file of an entry of inputs.json at the time of its submission."""
    return [FileState(**values) for values in entry["files"]]


def exports_of(run_dir: Path) -> Path:
    """Return the path of a run's exports.jsonl, which may not exist."""
    return run_dir / FOLDER / EXPORTS


def read_exports(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's exports.jsonl, oldest first, without damaged lines; nothing if the file cannot be read.

    A line's `path` is the export's. An export inside the run's folder has the right path even after the folder was moved.
    """
    path = exports_of(run_dir)
    for line in complete_lines(path):
        with contextlib.suppress(RecipeError):
            values = small_files.parsed(line, ExportLine, path)
            yield {**values, "path": str(run_dir / values["path"])}
