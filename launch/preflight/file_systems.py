"""Check the file systems of a run: writable folders, a key, model files, container images and free space.

The module calls `encryption_key.py`, `model_weights.py`, `container_images.py` and `disk_space.py`. It sees only the mounts of
the machine that submits the job; those of the nodes may differ.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.executors.executor import ROOT
from launch.preflight import container_images, disk_space, encryption_key, model_weights
from launch.preflight.disk_space import nearest_existing
from pipeline.config import Problem, Recipe
from pipeline.config.cluster import AUDIT_AUTO, AUDIT_NONE
from pipeline.seams import extras

LOCAL = frozenset(("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
"""File system types that are local to a machine unless it exports them."""


def problems(
    recipe: Recipe, pending: Sequence[os.PathLike] = (), notes: list[str] | None = None, on_nodes: bool = False
) -> Iterator[Problem]:
    """Yield the problems of folders to write, keys, models' files, containers and free space.

    pending: models of needed recipes that have not run yet, which are not checked. notes: receives findings that need not be
    errors. on_nodes: whether the ranks run on a cluster's nodes, so that containers and shared folders matter.
    """
    notes, pending = [] if notes is None else notes, list(pending)
    checkpoints = Path(recipe.run_dir).absolute() / "checkpoints"
    if os.path.lexists(checkpoints):  # of the run folder itself `run_setup` sees to that
        yield from _check_writable("run_dir", checkpoints, "another run_dir")
    yield from encryption_key.problems(recipe, notes, on_nodes)
    if recipe.cluster.audit not in (AUDIT_AUTO, AUDIT_NONE):
        yield from extras.missing("audit", "cluster.audit", recipe.cluster.audit)
    yield from model_weights.problems(recipe, pending, notes)
    if on_nodes:
        yield from container_images.problems(recipe, pending)
        _note_local({"run_dir": Path(recipe.run_dir), "the code": ROOT}, notes)
    yield from disk_space.problems(recipe, pending, notes)


def _check_writable(key: str, folder: Path, instead: str) -> Iterator[Problem]:
    existing = nearest_existing(folder)
    if not existing.is_dir():
        yield Problem(key, "not-a-folder", f"{existing} is a file, so the folder {folder} cannot be made. Try {instead}")
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        message = f"{folder} cannot be written: {getpass.getuser()} cannot write to {existing}. Try {instead}"
        yield Problem(key, "permission-denied", message)


def _note_local(folders: dict[str, Path], notes: list[str]) -> None:
    """Add notes on folders that are on local file systems. folders: key of the recipe -> the folder that it sets."""
    folders_of: dict[tuple[str, str], list[str]] = {}
    for key, folder in folders.items():
        folders_of.setdefault(file_system(folder), []).append(f"{key} ({folder.absolute()})")
    for (kind, mounted), names in folders_of.items():
        if kind in LOCAL:
            notes.append(
                f"{', '.join(names)}: on {mounted}, a file system of type {kind}, which is usually local to a machine; all"
                " nodes of the job must see it"
            )


def file_system(path: Path) -> tuple[str, str]:
    """Return (type, mount point) of the file system of a path that may not exist yet. See proc(5), /proc/[pid]/mountinfo."""
    real = nearest_existing(path).resolve()
    covering = ("unknown", "/")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = before.split()[4].replace(r"\040", " ")
        if real.is_relative_to(mounted) and len(mounted) >= len(covering[1]):  # a later mount hides an earlier one
            covering = after.split()[0], mounted
    return covering
