"""Read the lineage of everything below a folder: a graph of data, models, runs, checkpoints, exports and evaluations.

Files are known by their content, so a renamed or copied file is the same node. A checkpoint is known by the id in its
lineage.json, an export by that id and by the content of its weights. Runs elsewhere are known only from the lineage.json of an
export that came here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launch.governance.inputs import content, is_weights
from launch.runs import score_tables
from launch.runs.run_folder import DEEPEST, RunFolder, find
from pipeline.checkpoints import checkpoint
from pipeline.config import RecipeError
from pipeline.lineage import file_hashes, input_records
from pipeline.lineage.file_hashes import FileState
from pipeline.lineage.input_records import FOLDER, HASHES

Kind = Literal["data", "model", "prompt", "code", "image", "run", "evaluation", "checkpoint", "export"]
INSIDE = "evaluations/*/step_*/recipe.yaml"
DIFFERS = "its files differ from its lineage.json"


@dataclass
class LineageNode:
    """Something that was made, or from which something else was made."""

    key: str
    kind: Kind
    label: str
    path: str | None = None  # None if it is not below the folder
    facts: dict[str, str] = field(default_factory=dict)
    hashes: set[str] = field(default_factory=set)  # SHA-256 of the files that make it what it is
    others: set[str] = field(default_factory=set)  # of its other files, such as a tokenizer


@dataclass
class Lineage:
    """A graph of what was made from what.

    It has a cycle only where an export has the same weights as a model that the export's own run was made from.
    """

    root: Path | None = None  # the folder of the runs
    nodes: dict[str, LineageNode] = field(default_factory=dict)
    parents: dict[str, dict[str, str]] = field(default_factory=dict)  # key -> key of what it was made from -> as what
    children: dict[str, dict[str, str]] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)  # id of a run -> key of its node
    unhashed: list[tuple[str, FileState]] = field(default_factory=list)  # files of nodes whose hashes are unknown

    def add(self, node: LineageNode) -> LineageNode:
        """Add a node, and return it.

        If the graph has a node with this key, merge path, hashes and facts into that, and return it.
        """
        known = self.nodes.setdefault(node.key, node)
        known.path = known.path or node.path
        known.hashes |= node.hashes
        known.others |= node.others
        known.facts = node.facts | known.facts
        return known

    def link(self, parent: LineageNode, child: LineageNode, role: str) -> None:
        """Record that `child` was made from `parent`. role: what the parent was for the child, such as "model"."""
        if parent.key != child.key:
            self.parents.setdefault(child.key, {})[parent.key] = role
            self.children.setdefault(parent.key, {})[child.key] = role

    def beyond(self, begin: Iterable[str], down: bool) -> dict[str, str]:
        """Return key -> key of the node before it, for each node that can be reached from `begin`, nearest first.

        down: follow descendants; otherwise ancestors.
        """
        edges = self.children if down else self.parents
        reached: dict[str, str] = {}
        queue = list(dict.fromkeys(begin))
        first = set(queue)
        for key in queue:
            for other in edges.get(key, ()):
                if other not in reached and other not in first:
                    reached[other] = key
                    queue.append(other)
        return reached


def read(root: Path) -> Lineage:
    """Return the lineage of all runs below a folder."""
    found = Lineage(root)
    runs = [run for top in find(root, DEEPEST) for run in (top, *(path.parent for path in sorted(top.glob(INSIDE))))]
    for add in (_add_outputs, _add_inputs):
        for run_dir in runs:
            try:
                add(found, run_dir)
            except (RecipeError, OSError) as error:  # a damaged file of one run does not hide the others
                run = found.add(LineageNode(f"run:{os.path.realpath(run_dir)}", "run", run_dir.name, str(run_dir)))
                run.facts["warning"] = str(error)
    return found


# ---- what runs made -----------------------------------------------------------------------------------------------------


def _add_outputs(found: Lineage, run_dir: Path) -> None:
    run = found.add(_run(run_dir))
    if own_id := input_records.run_id(run_dir):
        found.runs.setdefault(own_id, run.key)
    for folder in sorted((run_dir / "checkpoints").glob("step_*")):
        if checkpoint.NAME.fullmatch(folder.name) and (folder / checkpoint.COMPLETE).exists():
            own = input_records.origin_of(folder) or {}
            found.link(run, _checkpoint(found, own, run.label, str(folder)), "made by")
    for line in input_records.read_exports(run_dir):
        record = input_records.read_origin(Path(line["path"])) or line
        made = _export(found, record, run.label, line["path"] if Path(line["path"]).exists() else None)
        origin = _checkpoint(found, line["checkpoint"], run.label, None)
        found.link(run, origin, "made by")
        found.link(origin, made, "exported from")


def _run(run_dir: Path) -> LineageNode:
    key, path = f"run:{os.path.realpath(run_dir)}", str(run_dir)
    try:
        run = RunFolder.at(run_dir)
    except RecipeError:
        return LineageNode(key, "run", run_dir.name, path, {"recipe": "cannot be read"})
    last = run.submissions[-1] if run.submissions else {}
    facts = _facts(run.algorithm, last)
    if run.trains:
        return LineageNode(key, "run", run_dir.name, path, facts)
    scores = _scores(run_dir)
    label = f"{scores['suite']} of {_evaluated(scores)}" if scores else run_dir.name
    facts |= {name: _score(task) for name, task in (scores or {"tasks": {}})["tasks"].items()}
    return LineageNode(key, "evaluation", label, path, facts)


def _facts(algorithm: str, submission: Mapping[str, Any]) -> dict[str, str]:
    git = submission.get("git") or {}
    commit = f"{git['commit'][:12]}{', changed' if git['dirty'] else ''}" if git else ""
    found = {"algorithm": algorithm, "code": commit, "recipe": (submission.get("recipe") or "")[:12]}
    return {name: value for name, value in found.items() if value}


def _evaluated(scores: Mapping[str, Any]) -> str:
    """Return the name of the checkpoint, or of the model, that has these scores."""
    if scores.get("run"):
        return f"{Path(scores['run']).name}, step {scores['step']}"
    model = scores["model"]
    return "/".join(Path(model).parts[-2:]) if os.path.isabs(model) else model


def _scores(run_dir: Path) -> dict[str, Any] | None:
    try:
        return score_tables.read(run_dir)
    except RecipeError:
        return None


def _score(task: Mapping[str, Any]) -> str:
    value = task["metrics"][task["metric"]]["value"]
    return f"{task['metric']} {'?' if value is None else format(value, '.3f')}"


def _checkpoint(found: Lineage, own: Mapping[str, Any], run: str, path: str | None) -> LineageNode:
    """Add a checkpoint, and return its node.

    own: the checkpoint's origin, as in a lineage.json or as `pipeline.lineage.input_records.origin_of` returns it.
    """
    place = own.get("path") or path
    key = own.get("id") or (os.path.realpath(place) if place else f"{run} {own.get('step')}")
    return found.add(LineageNode(f"checkpoint:{key}", "checkpoint", f"{run}, step {own.get('step', '?')}", path))


def _export(found: Lineage, record: Mapping[str, Any], run: str, path: str | None) -> LineageNode:
    """Add an export, and return its node. record: the contents of its lineage.json, or its line in exports.jsonl."""
    label = f"{record.get('format', 'hf')} of {run}, step {record['step']}"
    weights = {own for name, own in record["files"].items() if is_weights(name)}
    others = set(record["files"].values()) - weights
    return found.add(LineageNode(f"export:{record['id']}", "export", label, path, {}, weights, others))


# ---- what runs were made from -------------------------------------------------------------------------------------------


def _add_inputs(found: Lineage, run_dir: Path) -> None:
    run = found.nodes[f"run:{os.path.realpath(run_dir)}"]
    hashes = dict(file_hashes.read_hashes(run_dir / FOLDER / HASHES))
    entries = input_records.read_inputs(run_dir).get("inputs", ())
    of_checkpoint = any(entry["role"] == "checkpoint" for entry in entries)
    for entry in entries:
        if of_checkpoint and entry["key"] == "policy.model_name":
            continue  # the evaluated weights are the checkpoint's
        files = input_records.files_of(entry)
        known = {state.path: own for state in files if (own := hashes.get(state))}
        node = _input(found, entry, known)
        found.unhashed += [(node.key, state) for state in files if state not in hashes]
        found.link(node, run, entry["role"])


def _input(found: Lineage, entry: Mapping[str, Any], hashes: Mapping[str, str]) -> LineageNode:
    """Return the node of an entry of inputs.json. hashes: path -> SHA-256 of its files, as far as they are known."""
    weights = {own for path, own in hashes.items() if is_weights(path)}
    origin = entry["origin"]
    if origin and origin["kind"] == "checkpoint":
        node = _of_checkpoint(found, origin)
        node.hashes |= weights
        return node
    if origin:
        return foreign(found, origin, weights)
    if entry["role"] == "model" and (exported := _with_weights(found, weights)):
        return exported
    own = weights if entry["role"] == "model" and weights else set(hashes.values())
    complete = entry["files"] and len(hashes) == len(entry["files"])
    states = json.dumps([entry["files"], entry.get("arguments")], sort_keys=True)
    key = content(own) if complete else content([str(entry["name"]), states])
    label = str(entry["name"]) if not os.path.isabs(str(entry["name"])) else Path(entry["name"]).name
    facts = {"path": entry["path"]} if entry["path"] else {}
    facts |= {"sha256": key[:12]} if complete else {"hash": "not known"} if entry["files"] else {}
    facts |= _arguments(entry) if not entry["path"] else {}  # which tell generated data of one name apart
    others = set(hashes.values()) - own
    return found.add(LineageNode(f"{entry['role']}:{key}", entry["role"], label, entry["path"], facts, own, others))


def _arguments(entry: Mapping[str, Any]) -> dict[str, str]:
    given = (entry.get("arguments") or {}).items()
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in given if value not in (None, {})}


def _with_weights(found: Lineage, weights: set[str]) -> LineageNode | None:
    """Return the export whose files include all of these weights; None if there is none. weights: SHA-256 of the files."""
    exports = (node for node in found.nodes.values() if node.kind == "export")
    return next((node for node in exports if weights and weights <= node.hashes), None)


def foreign(found: Lineage, record: Mapping[str, Any], weights: set[str]) -> LineageNode:
    """Return the node of the export that a lineage.json describes.

    If the graph lacks the export, add it with its checkpoint, its run and the run's inputs. record: the contents of the
    lineage.json. weights: the known hashes of the weights beside it. If one of them is not in the lineage.json, the node gets a
    warning.
    """
    node = found.nodes.get(f"export:{record['id']}") or _from_record(found, record)
    if weights and node.hashes and not weights <= node.hashes:
        node.facts["warning"] = DIFFERS
    return node


def _from_record(found: Lineage, record: Mapping[str, Any]) -> LineageNode:
    node = _export(found, record, record["run"]["name"], None)
    maker = _maker(found, record["run"])
    between = _checkpoint(found, record["checkpoint"], maker.label, None)
    found.link(maker, between, "made by")
    found.link(between, node, "exported from")
    return node


def _of_checkpoint(found: Lineage, origin: Mapping[str, Any]) -> LineageNode:
    """Return the checkpoint that an input comes from, linked to its run. The checkpoint may have been removed since."""
    if "run" in origin:
        maker = _maker(found, origin["run"])
    else:  # of an earlier version: RUN/checkpoints/step_000010
        run_dir = Path(origin["path"]).parents[1]
        maker = found.add(LineageNode(f"run:{os.path.realpath(run_dir)}", "run", run_dir.name))
    node = _checkpoint(found, origin, maker.label, origin.get("path"))
    found.link(maker, node, "made by")
    return node


def _maker(found: Lineage, run: Mapping[str, Any]) -> LineageNode:
    """Return the run that a lineage.json describes.

    If it is not below the folder, add it, with the facts and inputs that are recorded. run: the value of the key `run`.
    """
    if run["id"] in found.runs:
        return found.nodes[found.runs[run["id"]]]
    facts = _facts(run["algorithm"], run) if "algorithm" in run else {}
    maker = found.add(LineageNode(f"run:{run['id']}", "run", run["name"], None, facts))
    for entry in run.get("inputs", ()):
        as_input = {**entry, "path": None, "files": list(entry["files"])}
        node = _input(found, as_input, {name: own for name, own in entry["files"].items() if own})
        found.link(node, maker, entry["role"])
    return maker
