"""Keep a registry of models: a folder with a file for each model's name, which holds its versions, their stages and scores.

    registry/NAME.json   name, and versions: version, stage, export, id, run, step, scores, files, history of each

A version refers to an export, whose weights stay where they are. Their hashes are recorded by `add`, so later changes of the
files are noticed. The export's lineage.json is not signed. At most one version of a name is in production. Each change replaces
a file as a whole, under a lock of the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from launch.governance import graph, search
from launch.governance.audit_log import Action, as_record, folder_for, record
from launch.runs import score_tables, shared_files
from launch.runs.shared_files import Unusable
from pipeline.checkpoints.verification import WITHOUT_DIGEST
from pipeline.config import Problem, RecipeError
from pipeline.config.cluster import AUDIT_AUTO
from pipeline.config.data import NAME
from pipeline.files import small_files
from pipeline.files.storage import user_name
from pipeline.lineage import input_records
from pipeline.lineage.file_hashes import HashCache
from pipeline.lineage.input_records import MARK

Stage = Literal["candidate", "production", "retired"]
STAGES: tuple[str, ...] = get_args(Stage)
LOCK_S = 30.0


class _Score(TypedDict):
    task: str
    value: float | None


class _Version(TypedDict):
    version: int
    stage: Stage
    export: str
    id: str
    run: str
    step: int
    scores: list[_Score]
    files: dict[str, str]  # name -> SHA-256
    history: list[dict[str, Any]]


class _Versions(TypedDict):
    versions: list[_Version]


@dataclass(frozen=True)
class ModelVersion:
    """A version of a named model: an export, whose files stay where they are, and its stage."""

    name: str
    version: int  # from 1
    stage: Stage
    export: str  # the folder
    id: str  # of the export's weights, by content
    run: str  # the name of the run that it is from
    step: int  # of the checkpoint
    scores: Sequence[Mapping[str, Any]]  # suite, task, metric, value, low, high, questions and evaluation of each task
    files: Mapping[str, str]  # SHA-256 by name
    history: Sequence[Mapping[str, Any]]  # time, user and stage of each change


class ModelRegistry:
    """Holds the named versions of models in a folder. Each change adds a line to the audit log."""

    def __init__(self, folder: Path, audit: str = AUDIT_AUTO):
        """Open the registry in a folder. audit: where changes are logged, a value as of the key `cluster.audit`."""
        self.folder = folder
        self._audit = audit

    def __repr__(self) -> str:
        return f"ModelRegistry({str(self.folder)!r})"

    def names(self) -> list[str]:
        """Return the names that have versions, in order."""
        return sorted(path.stem for path in self.folder.glob("*.json") if not path.name.startswith("."))

    def versions(self, name: str | None = None) -> list[ModelVersion]:
        """Return the versions of a name, or with None of all names, oldest first. Raises RecipeError for a damaged file."""
        names = self.names() if name is None else [name]
        return [_version(one_name, values) for one_name in names for values in self._read(one_name)]

    def show(self, name: str, version: int | None = None) -> ModelVersion:
        """Return a version of a name. version: None: the one in production, else the latest. Raises RecipeError without one."""
        versions = self.versions(name)
        if not versions:
            known = ", ".join(self.names()) or "none"
            raise RecipeError(Problem("name", "file-not-found", f"got {name}; expected a name in {self.folder}: {known}"))
        if version is None:
            return next((entry for entry in versions if entry.stage == "production"), versions[-1])
        for entry in versions:
            if entry.version == version:
                return entry
        numbers = ", ".join(str(entry.version) for entry in versions)
        raise RecipeError(Problem("version", "file-not-found", f"got {version}; expected a version of {name}: {numbers}"))

    def add(self, name: str, export: str | os.PathLike[str], *, root: str | os.PathLike[str] = "runs") -> ModelVersion:
        """Add an export to a name as its next version, in the stage `candidate`, and return that version.

        Args:
            name: letters, digits, _ and -.
            export: the folder of an export.
            root: the folder of the runs, whose evaluations of the export, or of its checkpoint, give the scores.

        Raises:
            RecipeError: if the name is not valid or has this export already, if the folder has no lineage.json, if the export's
                files were changed, or if the change cannot be recorded.
        """
        if not NAME.fullmatch(name):
            raise RecipeError(Problem("name", "bad-format", f"got '{name}'; expected letters, digits, _ and -"))
        export, root = Path(export).absolute(), Path(root).absolute()
        origin = read_export(export)
        cache = HashCache.below(root)
        if changed := changes(export, origin["files"], cache):
            raise RecipeError(_changed("export", export, changed))
        made = {
            "stage": "candidate",
            "export": str(export),
            "id": origin["id"],
            "run": origin["run"]["name"],
            "step": origin["step"],
            "scores": list(scores(export, root, cache)),
            "files": origin["files"],
        }

        def append(versions: list[dict[str, Any]]) -> dict[str, Any]:
            if (same := [each for each in versions if each["id"] == made["id"] and each["export"] == made["export"]]) != []:
                why = f"got {export}, which is version {same[0]['version']} of {name} already; expected another export"
                raise RecipeError(Problem("export", "already-exists", why))
            number = 1 + max((each["version"] for each in versions), default=0)
            versions.append({"version": number, **made, "history": []})
            return versions[-1]

        return self._change(name, "add", append, {"export": str(export), "stage": "candidate"})

    def promote(self, name: str, version: int, stage: Stage) -> ModelVersion:
        """Put a version into a stage, and return it. A new version in production retires the one that was there.

        Raises RecipeError if there is no such version or stage, if the version is in that stage already, if it is to go into
        production and its files are not as they were exported, or if the change cannot be recorded.
        """
        if stage not in STAGES:
            raise RecipeError(Problem("stage", "not-a-choice", f"got {stage}; expected {', '.join(STAGES)}"))
        present = self.show(name, version)
        if present.stage == stage:
            why = f"got {stage}, the present stage of version {version} of {name}; expected another stage"
            raise RecipeError(Problem("stage", "contradiction", why))
        if stage == "production" and (changed := changes(Path(present.export), present.files, HashCache(None))):
            raise RecipeError(_changed("version", Path(present.export), changed))

        def change(versions: list[dict[str, Any]]) -> dict[str, Any]:
            for each in versions:
                if stage == "production" and each["stage"] == "production":
                    each["stage"] = "retired"
                    each["history"].append({**_now(), "stage": "retired", "why": f"version {version} took its place"})
            own = next(each for each in versions if each["version"] == version)
            own["stage"] = stage
            return own

        return self._change(name, "promote", change, {"version": version, "stage": stage})

    def _change(
        self, name: str, action: Action, change: Callable[[list[dict[str, Any]]], dict[str, Any]], details: dict[str, Any]
    ) -> ModelVersion:
        """Apply `change` to the versions of a name, under the registry's lock, and return the version that `change` returns.

        A line goes into the audit log before the file is written.
        """
        path = self.folder / f"{name}.json"
        with self._locked():
            versions = self._read(name)
            own = change(versions)
            root = folder_for(self._audit, self.folder)
            receipt = record(action, path, {**details, "version": own["version"]}, root) if root else None
            own["history"].append({**_now(), "stage": own["stage"], "audit": as_record(receipt)})
            small_files.write(path, {"name": name, "versions": versions})
        return _version(name, own)

    def _read(self, name: str) -> list[dict[str, Any]]:
        found = small_files.read(self.folder / f"{name}.json", _Versions, "name", "Try to restore it from a copy")
        return [dict(entry) for entry in found["versions"]] if found else []

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with shared_files.lock_file(self.folder / ".lock", LOCK_S):
                yield
        except Unusable as error:
            why = f"got {self.folder}, {error.why}; expected a writable folder. Try {error.remedy}, or another registry=..."
            raise RecipeError(Problem("registry", error.code, why)) from error


def _version(name: str, values: Mapping[str, Any]) -> ModelVersion:
    return ModelVersion(name, **{column.name: values[column.name] for column in fields(ModelVersion)[1:]})


def _now() -> dict[str, str]:
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "user": user_name(os.geteuid())}


def read_export(folder: Path) -> dict[str, Any]:
    """Return the lineage.json of an exported model. Raises RecipeError if the folder has none."""
    found = input_records.read_origin(folder)
    if found is None or found["kind"] != "export":
        why = f"got {folder}, which has no {MARK} of an export; expected a folder that `python launch/export.py` wrote"
        raise RecipeError(Problem("export", "file-not-found", why))
    return found


def changes(folder: Path, files: Mapping[str, str], cache: HashCache) -> list[str]:
    """Return how the files of an export differ from their recorded hashes: `x is missing`, `x was changed`, `x is new`.

    files: file name -> SHA-256.
    """
    found = []
    for name, own in files.items():
        try:
            if cache.sha256(folder / name)[1] != own:
                found.append(f"{name} was changed")
        except OSError:
            found.append(f"{name} is missing")
    there = {os.path.relpath(state.path, folder) for state in input_records.states(folder)}
    return [*found, *(f"{name} is new" for name in sorted(there - {*files, *WITHOUT_DIGEST}))]


def _changed(key: str, folder: Path, changed: list[str]) -> Problem:
    return Problem(key, "tampered", f"got {folder}, in which {', '.join(changed)}; expected the files as they were exported")


def scores(export: Path, root: Path, cache: HashCache) -> Iterator[dict[str, Any]]:
    """Yield the score of each task in an export's evaluations, as a dict.

    Its keys are "suite", "task", "metric", "value", "low", "high", "questions" and "evaluation". The evaluations are those
    below `root` of the export itself, or of the checkpoint that it was made from.
    """
    found = graph.read(root)
    own = search.nodes_at(found, export, cache, "export")
    checkpoints = [parent for node in own for parent in found.parents.get(node.key, ())]
    nodes = {key for begin in (*(node.key for node in own), *checkpoints) for key in found.children.get(begin, ())}
    for node in sorted((found.nodes[key] for key in nodes), key=lambda node: node.label):
        result = score_tables.read(Path(node.path)) if node.kind == "evaluation" and node.path else None
        for task, summary in (result or {"tasks": {}})["tasks"].items():
            metric = summary["metrics"][summary["metric"]]
            interval = {end: metric.get(end) for end in ("value", "low", "high")}
            known = {"suite": result and result["suite"], "task": task, "metric": summary["metric"], **interval}
            yield known | {"questions": summary["questions"], "evaluation": node.path}
