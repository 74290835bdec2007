"""Write lineage.json beside an exported model: everything that the model comes from, known by content, without local paths.

The observer at the end calls this for each export, and writes what a run is made from at its submission.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.governance import inputs, model_card
from launch.governance.inputs import content, is_weights
from launch.runs import shared_files
from launch.runs.run_events import RunObserver
from launch.runs.run_folder import RunFolder
from launch.runs.shared_files import Unusable
from pipeline.checkpoints.verification import WITHOUT_DIGEST
from pipeline.config import Problem, Recipe, RecipeError
from pipeline.files import digests, small_files
from pipeline.lineage import file_hashes, input_records
from pipeline.lineage.file_hashes import HashCache
from pipeline.lineage.input_records import FOLDER, HASHES, MARK

LOCK_S = 60.0
"""How long an export waits while another export of the same run adds its line."""
DEPTH = 4  # levels from a model in a checkpoint to its run: RUN/checkpoints/step_000010/hf


def write(run_dir: Path, checkpoint: Path, step: int, folder: Path, form: str, receipt: Mapping[str, Any] | None) -> None:
    """Write the lineage.json of an exported model into `folder`, and add a line to the exports of its run.

    checkpoint: the folder of the checkpoint. form: hf or adapter. receipt: the receipt of the export's line in the audit log.
    Raises OSError, and RecipeError if the line cannot be added.
    """
    known = input_records.read_inputs(run_dir)
    files = _hashes(folder, HashCache(Path(known["cache"]) if known.get("cache") else None))
    origin = input_records.origin_of(checkpoint) or {}
    own = content(value for name, value in files.items() if is_weights(name))
    record = {
        "kind": "export",
        "id": own,
        "format": form,
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": {"kind": "checkpoint", "id": origin.get("id"), "step": step},
        "run": of_run(run_dir),
        "files": files,
    }
    small_files.write(folder / MARK, record)
    line = {key: record[key] for key in ("id", "format", "step", "time", "files")}
    kept = record["checkpoint"] if origin.get("id") else {"path": str(checkpoint), "step": step}
    folder, run_dir = folder.absolute(), run_dir.absolute()
    place = folder.relative_to(run_dir) if folder.is_relative_to(run_dir) else folder  # the run's folder may be moved
    line |= {"checkpoint": kept, "path": str(place), "audit": receipt}
    _add_line(input_records.exports_of(run_dir), line)


def _hashes(folder: Path, cache: HashCache) -> dict[str, str]:
    """Return file name -> SHA-256 for the files of an export, without the model card and lineage.json.

    Uses the hashes that the export listed itself, and computes the others.
    """
    try:
        listed, own = digests.read_manifest(folder)
        listed[digests.MANIFEST] = own
    except FileNotFoundError:
        listed = {}
    found = {}
    for state in input_records.states(folder):
        name = os.path.relpath(state.path, folder)
        if name in listed:
            found[name] = listed[name]
            cache.add(state, listed[name])
        elif name not in WITHOUT_DIGEST:
            found[name] = cache.sha256(Path(state.path))[1]
    return found


def _add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file that other exports may append to at the same time."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with shared_files.lock_file(path, LOCK_S):
            small_files.append(path, line)
    except Unusable as error:
        why = f"got {path}, {error.why}; expected a file to add the export to. Try {error.remedy}"
        raise RecipeError(Problem("run", error.code, why)) from error


def of_run(run_dir: Path) -> dict[str, Any]:
    """Return {"id", "name", "algorithm", "git", "recipe", "images", "inputs"} of a run, for a lineage.json.

    inputs: a list of {"key", "role", "name", "files": file name -> SHA-256 or None, "origin"}, with "arguments" unless these
    have an absolute path. Names that are paths are reduced to their last part.
    """
    run = RunFolder.at(run_dir)
    last = run.submissions[-1] if run.submissions else {}
    hashes = dict(file_hashes.read_hashes(run_dir / FOLDER / HASHES))
    images = {name: image.get("digest") for name, image in (last.get("images") or {}).items()}
    made_of = []
    for entry in input_records.read_inputs(run_dir).get("inputs", ()):
        base = Path(entry["path"] or "/")
        base = base if base.is_dir() else base.parent
        files = {os.path.relpath(state.path, base): hashes.get(state) for state in input_records.files_of(entry)}
        name = Path(entry["name"]).name if os.path.isabs(entry["name"]) else entry["name"]
        made_of.append({"key": entry["key"], "role": entry["role"], "name": name, "files": files, "origin": _origin(entry)})
        if '"/' not in json.dumps(arguments := entry.get("arguments")):  # no absolute path
            made_of[-1]["arguments"] = arguments
    return {
        "id": input_records.run_id(run_dir) or content([str(run_dir)]),
        "name": run_dir.name,
        "algorithm": run.algorithm,
        "git": last.get("git"),
        "recipe": last.get("recipe"),
        "images": images,
        "inputs": made_of,
    }


def _origin(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the origin of an input.

    For a checkpoint, it includes what the checkpoint's run was made from, if that run is here.
    """
    origin = entry["origin"]
    if not origin or origin["kind"] != "checkpoint":
        return origin
    real = Path(os.path.realpath(entry["path"]))
    above = next((each for each in list(real.parents)[:DEPTH] if (each / "recipe.yaml").is_file()), None)
    if above is None or input_records.run_id(above) != origin.get("run", {}).get("id"):
        return {key: value for key, value in origin.items() if key != "path"}
    return {"kind": "checkpoint", "id": origin.get("id"), "step": origin["step"], "run": of_run(above)}


class AncestryObserver(RunObserver):
    """Writes inputs.json for each run, and lineage.json and the model card for each export."""

    def prepared(self, recipe: Recipe, run_dir: Path) -> list[str]:
        """Write inputs.json, and return a warning for each input file that was rewritten since an earlier submission."""
        return inputs.write(recipe, run_dir)

    def exported(self, run_dir: Path, checkpoint: Path, step: int, form: str, out: Path, receipts: Mapping[str, Any]) -> None:
        """Write lineage.json and the model card into the export. Raises OSError and RecipeError."""
        write(run_dir, checkpoint, step, out, form, receipts.get("audit"))
        (out / model_card.FILE).write_text(model_card.text(RunFolder.at(run_dir), step), encoding="utf-8")


OBSERVER = AncestryObserver()
