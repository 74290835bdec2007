"""Find the nodes of a path in the lineage, and everything that was made from a file or a folder, known by its content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.governance import graph
from launch.governance.graph import Lineage, LineageNode
from launch.governance.inputs import is_weights
from pipeline.config import Problem, RecipeError
from pipeline.lineage import file_hashes, input_records
from pipeline.lineage.file_hashes import HashCache


@dataclass(frozen=True)
class Descendant:
    """Something that was made from the nodes of a query."""

    node: LineageNode
    through: tuple[LineageNode, ...]  # nodes between the two, the oldest first; () if it was made from it directly


def nodes_at(found: Lineage, path: Path, cache: HashCache, key: str = "path") -> list[LineageNode]:
    """Return the nodes of a run, a checkpoint, an export, an evaluation, a model or a data file, by its path or its content.

    key: the key that a RecipeError names. Raises RecipeError if the path does not exist or the lineage does not know it.
    """
    if not path.exists():
        raise RecipeError(Problem(key, "file-not-found", f"got {path}, which does not exist; expected a file or a folder"))
    real = os.path.realpath(path)
    same = [node for node in found.nodes.values() if node.path and os.path.realpath(node.path) == real]
    if same:
        return same
    origin = input_records.origin_of(path) if path.is_dir() else None
    if origin and (node := found.nodes.get(f"{origin['kind']}:{origin.get('id')}")):
        return [node]
    if nodes := with_content(found, path, cache):
        return nodes
    if origin and origin["kind"] == "export":
        weights = {cache.sha256(Path(state.path))[1] for state in input_records.states(path) if is_weights(state.path)}
        return [graph.foreign(found, origin, weights)]
    message = f"got {path}, which is neither an input nor an output of a run below {found.root}; expected a run, a checkpoint,"
    message = f"{message} an export, or a run's model or data. Try root=RUNS with the folder of the runs"
    raise RecipeError(Problem(key, "file-not-found", message))


def with_content(found: Lineage, path: Path, cache: HashCache) -> list[LineageNode]:
    """Return the nodes that have the content of a file, or of any file in a folder.

    In a folder with weights only the weights count, because many models share a tokenizer and a config. If no run has recorded
    the hash of a file in the lineage, it is computed if the file has the size of one at `path`. Raises OSError.
    """
    files = input_records.states(path)
    weights = [state for state in files if is_weights(state.path)]
    is_model = path.is_dir() and bool(weights)
    asked = weights if is_model else [state for state in files if state.size]
    wanted = {cache.sha256(Path(state.path))[1] for state in asked}
    _hash_candidates(found, {state.size for state in asked}, cache)
    return [node for node in found.nodes.values() if wanted & node.hashes or (not path.is_dir() and wanted & node.others)]


def _hash_candidates(found: Lineage, sizes: set[int], cache: HashCache) -> None:
    """Hash files of the lineage that have no known hash, and add the hashes to their nodes.

    Only files that have one of these sizes, and that have not changed since a run recorded them, are hashed.
    """
    left = []
    for key, state in found.unhashed:
        try:
            is_same = state.size in sizes and file_hashes.FileState.of(Path(state.path)) == state
        except OSError:
            is_same = False
        if is_same:
            node, own = found.nodes[key], cache.sha256(Path(state.path))[1]
            (node.hashes if node.kind != "model" or is_weights(state.path) else node.others).add(own)
        else:
            left.append((key, state))
    found.unhashed = left


def descendants(found: Lineage, begin: list[LineageNode]) -> Iterator[Descendant]:
    """Yield everything that was made from these nodes, directly or indirectly, the nearest first."""
    before = found.beyond([node.key for node in begin], down=True)
    first = {node.key for node in begin}
    for key in before:
        between, at = [], before[key]
        while at not in first:
            between.append(found.nodes[at])
            at = before[at]
        yield Descendant(found.nodes[key], tuple(reversed(between)))
