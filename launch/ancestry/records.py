"""Write lineage.json beside an exported model: all that the model comes from, by content, and without anybody's paths."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.ancestry.inputs import content, is_weights
from launch.audit_log import Receipt, as_record
from launch.run_folder import RunFolder
from pipeline import lineage
from pipeline.checkpoint import Checkpoint
from pipeline.lineage import EXPORTS, FOLDER, HASHES, MARK, HashCache
from pipeline.storage import append, write_durably

DEPTH = 4  # levels from a model in a checkpoint to its run: RUN/checkpoints/step_000010/hf


def write(run_dir: Path, checkpoint: Checkpoint, folder: Path, form: str, receipt: Receipt | None) -> None:
    """Hash an exported model, write its lineage.json, and add a line to the exports of its run.

    form: hf or adapter. receipt: of the export's line in the audit log. Raises OSError.
    """
    known = lineage.read_inputs(run_dir)
    cache = HashCache(Path(known["cache"]) if known.get("cache") else None)
    files = {
        os.path.relpath(state.path, folder): cache.sha256(Path(state.path))[1]
        for state in lineage.states(folder)
        if Path(state.path).name != "README.md"  # the model card, which people edit
    }
    origin = lineage.origin_of(checkpoint.folder) or {}
    own = content(value for name, value in files.items() if is_weights(name))
    record = {
        "kind": "export",
        "id": own,
        "format": form,
        "step": checkpoint.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": {"kind": "checkpoint", "id": origin.get("id"), "step": checkpoint.step},
        "run": of_run(run_dir),
        "files": files,
    }
    write_durably(folder / MARK, json.dumps(record, indent=1) + "\n")
    line = {key: record[key] for key in ("id", "format", "step", "time", "files")}
    kept = record["checkpoint"] if origin.get("id") else {"path": str(checkpoint.folder), "step": checkpoint.step}
    line |= {"checkpoint": kept, "path": str(folder.absolute()), "audit": as_record(receipt)}
    path = run_dir / FOLDER / EXPORTS
    path.parent.mkdir(mode=0o700, exist_ok=True)
    append(path, path.stat().st_size if path.exists() else 0, (json.dumps(line) + "\n").encode())


def of_run(run_dir: Path) -> dict[str, Any]:
    """Return {"id", "name", "algorithm", "git", "recipe", "images", "inputs"} of a run, for a lineage.json.

    inputs: {"key", "role", "name", "files": name -> SHA-256 or None, "origin"} of each. Of a path only the last part is kept.
    """
    run = RunFolder.at(run_dir)
    last = run.submissions[-1] if run.submissions else {}
    hashes = dict(lineage.read_hashes(run_dir / FOLDER / HASHES))
    images = {name: image.get("digest") for name, image in (last.get("images") or {}).items()}
    inputs = []
    for entry in lineage.read_inputs(run_dir).get("inputs", ()):
        base = Path(entry["path"] or "/")
        base = base if base.is_dir() else base.parent
        files = {os.path.relpath(state.path, base): hashes.get(state) for state in lineage.files_of(entry)}
        name = Path(entry["name"]).name if os.path.isabs(entry["name"]) else entry["name"]
        inputs.append({"key": entry["key"], "role": entry["role"], "name": name, "files": files, "origin": _origin(entry)})
        if '"/' not in json.dumps(arguments := entry.get("arguments")):  # no absolute path
            inputs[-1]["arguments"] = arguments
    return {
        "id": lineage.run_id(run_dir) or content([str(run_dir)]),
        "name": run_dir.name,
        "algorithm": run.algorithm,
        "git": last.get("git"),
        "recipe": last.get("recipe"),
        "images": images,
        "inputs": inputs,
    }


def _origin(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the origin of an input; of a checkpoint with what its run was made from, if that is here."""
    origin = entry["origin"]
    if not origin or origin["kind"] != "checkpoint":
        return origin
    real = Path(os.path.realpath(entry["path"]))
    above = next((each for each in list(real.parents)[:DEPTH] if (each / "recipe.yaml").is_file()), None)
    if above is None or lineage.run_id(above) != origin.get("run", {}).get("id"):
        return {key: value for key, value in origin.items() if key != "path"}
    return {"kind": "checkpoint", "id": origin.get("id"), "step": origin["step"], "run": of_run(above)}
