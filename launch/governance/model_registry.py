"""Keep a registry of models: a folder with a file for each model's name, which holds its versions, their stages and scores.

    registry/NAME.json   name, and versions: version, stage, export, id, run, step, scores, files, history of each

A version refers to an export, whose weights stay where they are. Their hashes are recorded by `add`, so later changes of the
files are noticed. The export's lineage.json is not signed. At most one version of a name is in production. Each change replaces
a file as a whole, under a lock of the folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
class Registry:
    """A registry in a folder. audit: where its changes are logged, a value as of the key `cluster.audit` of a recipe."""

    folder: Path
    audit: str = AUDIT_AUTO

    def names(self) -> list[str]:
        """Return the names that have versions, in order."""
        return sorted(path.stem for path in self.folder.glob("*.json") if not path.name.startswith("."))

    def versions(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a name, oldest first; [] if there are none. Raises RecipeError for a damaged file."""
        found = small_files.read(self.folder / f"{name}.json", _Versions, "name", "Try to restore it from a copy")
        return [dict(each) for each in found["versions"]] if found else []

    def version(self, name: str, number: int | None = None) -> dict[str, Any]:
        """Return a version of a name.

        number: None: the version in production, else the latest. Raises RecipeError without one.
        """
        found = self.versions(name)
        if not found:
            known = ", ".join(self.names()) or "none"
            raise RecipeError(Problem("name", "file-not-found", f"got {name}; expected a name in {self.folder}: {known}"))
        if number is None:
            return next((each for each in found if each["stage"] == "production"), found[-1])
        for each in found:
            if each["version"] == number:
                return each
        numbers = ", ".join(str(each["version"]) for each in found)
        raise RecipeError(Problem("version", "file-not-found", f"got {number}; expected a version of {name}: {numbers}"))

    def add(self, name: str, export: Path, root: Path) -> dict[str, Any]:
        """Add an export to a name as its next version, in the stage `candidate`, and return that version.

        root: the folder of the runs, whose evaluations of the export give the scores. Raises RecipeError if the name has other
        characters than letters, digits, _ and -, if the folder has no lineage.json, if the export's files were changed, or if
        the export is a version of this name already.
        """
        if not NAME.fullmatch(name):
            raise RecipeError(Problem("name", "bad-format", f"got '{name}'; expected letters, digits, _ and -"))
        origin = read_export(export)
        cache = HashCache(root / f".hashes-{os.geteuid()}.jsonl" if root.is_dir() else None)
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

        def change(versions: list[dict[str, Any]]) -> dict[str, Any]:
            if (same := [each for each in versions if each["id"] == made["id"] and each["export"] == made["export"]]) != []:
                why = f"got {export}, which is version {same[0]['version']} of {name} already; expected another export"
                raise RecipeError(Problem("export", "already-exists", why))
            number = 1 + max((each["version"] for each in versions), default=0)
            versions.append({"version": number, **made, "history": []})
            return versions[-1]

        return self._change(name, "add", change, {"export": str(export), "stage": "candidate"})

    def promote(self, name: str, number: int, stage: Stage) -> dict[str, Any]:
        """Put a version into a stage, and return it. A new version in production retires the one that was there.

        Raises RecipeError if there is no such version or stage, if the version is in that stage already, or if it is to go into
        production and its files are not as they were exported.
        """
        if stage not in STAGES:
            raise RecipeError(Problem("stage", "not-a-choice", f"got {stage}; expected {', '.join(STAGES)}"))
        found = self.version(name, number)
        if found["stage"] == stage:
            why = f"got {stage}, the present stage of version {number} of {name}; expected another stage"
            raise RecipeError(Problem("stage", "contradiction", why))
        if stage == "production" and (changed := changes(Path(found["export"]), found["files"], HashCache(None))):
            raise RecipeError(_changed("version", Path(found["export"]), changed))

        def change(versions: list[dict[str, Any]]) -> dict[str, Any]:
            for each in versions:
                if stage == "production" and each["stage"] == "production":
                    each["stage"] = "retired"
                    each["history"].append({**_now(), "stage": "retired", "why": f"version {number} took its place"})
            own = next(each for each in versions if each["version"] == number)
            own["stage"] = stage
            return own

        return self._change(name, "promote", change, {"version": number, "stage": stage})

    def _change(
        self, name: str, action: Action, change: Callable[[list[dict[str, Any]]], dict[str, Any]], details: dict[str, Any]
    ) -> dict[str, Any]:
        """Apply `change` to the versions of a name, under the registry's lock, and return the version that `change` returns.

        A line goes into the audit log before the file is written.
        """
        path = self.folder / f"{name}.json"
        with self._locked():
            versions = self.versions(name)
            own = change(versions)
            root = folder_for(self.audit, self.folder)
            receipt = record(action, path, {**details, "version": own["version"]}, root) if root else None
            own["history"].append({**_now(), "stage": own["stage"], "audit": as_record(receipt)})
            small_files.write(path, {"name": name, "versions": versions})
        return own

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with shared_files.lock_file(self.folder / ".lock", LOCK_S):
                yield
        except Unusable as error:
            why = f"got {self.folder}, {error.why}; expected a writable folder. Try {error.remedy}, or another registry=..."
            raise RecipeError(Problem("registry", error.code, why)) from error


def _now() -> dict[str, str]:
    return {"time": datetime.now(UTC).isoformat(timespec="seconds"), "user": user_name(os.geteuid())}


def read_export(folder: Path) -> dict[str, Any]:
    """Return the lineage.json of an exported model. Raises RecipeError if the folder has none."""
    found = input_records.read_origin(folder)
    if found is None or found["kind"] != "export":
        why = f"got {folder}, which has no {MARK} of an export; expected a folder that `python launch/export.py` wrote"
        raise RecipeError(Problem("export", "file-not-found", why))
    return found


def changes(folder: Path, files: dict[str, str], cache: HashCache) -> list[str]:
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
