"""Check the file systems of a run: writable folders, a key, model files, container images and free space.

The module calls `model_weights.py`, `container_images.py` and `disk_space.py`. It sees only the mounts of
the machine that submits the job; those of the nodes may differ.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.executors.executor import ROOT
from launch.preflight import container_images, disk_space, model_weights
from launch.preflight.disk_space import nearest_existing
from pipeline.config import Problem, Recipe, collected
from pipeline.config.cluster import AUDIT_AUTO, AUDIT_NONE
from pipeline.files.stored_files import SECTION, obtain_key
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
    yield from _key_problems(recipe, notes, on_nodes)
    if recipe.cluster.audit not in (AUDIT_AUTO, AUDIT_NONE):
        yield from extras.missing("audit", "cluster.audit", recipe.cluster.audit)
    yield from model_weights.problems(recipe, pending, notes)
    if on_nodes:
        yield from container_images.problems(recipe, pending)
        _note_local({"run_dir": Path(recipe.run_dir), "the code": ROOT}, notes)
    yield from disk_space.problems(recipe, pending, notes)


def _key_problems(recipe: Recipe, notes: list[str], on_nodes: bool) -> Iterator[Problem]:
    """Yield the problem of the file with the key, or of the command that prints it. The command is not started here.

    on_nodes: whether the ranks run on other nodes. notes: receives a key file that is missing here and may be on the nodes.
    """
    encryption = recipe.checkpointing.encryption
    if encryption.key_file is not None:
        if on_nodes and not os.path.exists(encryption.key_file):
            notes.append(f"not checked: {SECTION}.key_file, as {encryption.key_file} is not on this machine")
            return
        key_problems: list[Problem] = []
        with collected(key_problems):
            obtain_key(encryption.key_file, None)
        yield from key_problems
    elif encryption.key_command is not None and not on_nodes:
        yield from _key_command_problems(encryption.key_command)


def _key_command_problems(command: str) -> Iterator[Problem]:
    key = f"{SECTION}.key_command"
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem(key, "bad-format", f"got `{command}`: {error}; expected a program and its arguments, quoted for a shell")
        return
    if not words or shutil.which(words[0]) is None:
        yield Problem(key, "file-not-found", f"got `{command}`; expected a program that is installed here and prints the key")


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
