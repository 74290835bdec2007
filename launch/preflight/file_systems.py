"""Check the file systems of a run: writable folders, a key, model files, container images and free space.

The module calls `model_weights.py` and `container_images.py`. It sees only the mounts of the machine that submits the job;
those of the nodes may differ.

A checkpoint of either backend holds the float32 weight of each trained parameter and the optimizer's states of the same size in
float32: two for Adam and its variants, and for unknown optimizers. The check of free space leaves out: replicas that all
tensor-parallel ranks write (norms), random states and JSON, together less than 1%; quotas that do not show as free space;
writes of other jobs.
"""

from __future__ import annotations

import getpass
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.executors.executor import ROOT
from launch.preflight import architecture, container_images, model_weights
from launch.recipes.model_files import is_inside, is_local, model_folder, planning_config
from launch.terminal.units import size
from pipeline import config
from pipeline.config import (
    PRECISIONS,
    OptimizerConfig,
    PolicyConfig,
    Problem,
    Recipe,
    adapters,
    collected,
    problems_of,
    ranks,
    uses_megatron,
)
from pipeline.config.cluster import AUDIT_AUTO, AUDIT_NONE
from pipeline.files.stored_files import SECTION, obtain_key
from pipeline.models.quantized import unpacked
from pipeline.models.tensors import Tensor, described, tensors
from pipeline.models.weight_files import read_weight_files
from pipeline.seams import extras

LOCAL = frozenset(("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
"""File system types that are local to a machine unless it exports them."""


STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Rprop": 2}  # per weight; others: 2. With momentum SGD, RMSprop: one more
ADAPTED = ("attention", "mlp", "shared", "routed")  # parts of a model with linear layers that get adapters
LEAST = 2  # checkpoints on disk: one that is kept, and one that is being written


def problems(
    recipe: Recipe, pending: Sequence[os.PathLike] = (), notes: list[str] | None = None, on_nodes: bool = False
) -> Iterator[Problem]:
    """Yield the problems of folders to write, keys, models' files, containers and free space.

    pending: models of needed recipes that have not run yet, which are not checked. notes: receives findings that need not be
    errors. on_nodes: whether the ranks run on a cluster's nodes, so that containers and shared folders matter.
    """
    notes, pending = [] if notes is None else notes, list(pending)
    yield from _unwritable(Path(recipe.run_dir).absolute() / "checkpoints")
    yield from _key_problems(recipe, notes, on_nodes)
    if recipe.cluster.audit not in (AUDIT_AUTO, AUDIT_NONE):
        yield from extras.missing("audit", "cluster.audit", recipe.cluster.audit)
    yield from model_weights.problems(recipe, pending, notes)
    if on_nodes:
        yield from container_images.problems(recipe, pending)
        _note_local({"run_dir": Path(recipe.run_dir), "the code": ROOT}, notes)
    yield from _space_problems(recipe, pending, notes)


def _key_problems(recipe: Recipe, notes: list[str], on_nodes: bool) -> Iterator[Problem]:
    """Yield the problem of the file with the key, or of the command that prints it. The command is not started here.

    on_nodes: whether the ranks run on other nodes. notes: receives a key file that is missing here and may be on the nodes.
    """
    encryption = recipe.checkpointing.encryption
    if encryption.key_file is not None:
        if on_nodes and not os.path.exists(encryption.key_file):
            notes.append(f"not checked: {SECTION}.key_file, as {encryption.key_file} is not on this machine")
            return
        key_file = encryption.key_file
        yield from problems_of(lambda: obtain_key(key_file, None))
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


def _unwritable(checkpoints: Path) -> Iterator[Problem]:
    """Yield a problem if the folder of checkpoints exists and is not writable; `run_setup` checks the run folder itself."""
    if not os.path.lexists(checkpoints):
        return
    existing = nearest_existing(checkpoints)
    if not existing.is_dir():
        message = f"{existing} is a file, so the folder {checkpoints} cannot be made"
        yield Problem("run_dir", "not-a-folder", f"{message}. Try another run_dir")
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        message = f"{checkpoints} cannot be written: {getpass.getuser()} cannot write to {existing}. Try another run_dir"
        yield Problem("run_dir", "permission-denied", message)


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


def nearest_existing(path: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


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


# ---- free space ---------------------------------------------------------------------------------------------------------


def _space_problems(recipe: Recipe, pending: Sequence[os.PathLike], notes: list[str]) -> Iterator[Problem]:
    """Yield a problem if the disk of the run folder has too little room for the run's checkpoints.

    notes: receives checks that were not possible.
    """
    if not config.trains(recipe) or not (nbytes := _checkpoint(recipe, pending, notes)):
        return
    keep, run_dir = recipe.checkpointing.keep_top_k, Path(recipe.run_dir).absolute()
    if keep is None and config.bound(config.section(recipe).max_num_steps) is None:
        notes.append(
            f"checkpointing.keep_top_k: null keeps every checkpoint, {size(nbytes)} each, and their number"
            f" is not known without {recipe.algorithm}.max_num_steps; room was checked for {LEAST}"
        )
    folder = nearest_existing(run_dir / "checkpoints")
    disk = os.statvfs(folder)
    if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):  # file_systems.py reports this
        return
    free, at_once = disk.f_bavail * disk.f_frsize, _at_once(recipe, keep)
    existing = sum(path.stat().st_size for path in run_dir.glob("checkpoints/step_*/**/*") if path.is_file())
    needed = max(0.0, at_once * nbytes - existing)
    files = at_once * (2 * ranks(recipe.cluster.train) * len({"policy", "value"} & config.models(recipe).keys()) + 2)
    if needed > free:
        consolidated = ", checkpointing.save_consolidated" if recipe.checkpointing.save_consolidated else ""
        terms = f"{at_once} checkpoints of {size(nbytes)} at once (checkpointing.keep_top_k={keep}{consolidated})"
        terms += f", of which {size(existing)} are on the disk" if existing else ""
        fewer = int((free + existing) // nbytes) - (2 if recipe.checkpointing.metric_name else 1)  # the inverse of `_at_once`
        hint = f"checkpointing.keep_top_k={fewer}, which fits, or another run_dir"
        hint = hint if fewer > 0 else "another run_dir, or checkpointing.enabled=false"
        message = f"{size(free)} are free on the file system of {folder}, and this run will write {size(needed)} there: {terms}"
        yield Problem("run_dir", "no-space", f"{message}. Try {hint}")
    elif disk.f_files and files > disk.f_favail:
        message = f"the file system of {folder} has room for {disk.f_favail} more files, and this run will write {files} there"
        yield Problem("run_dir", "no-space", f"{message}. Try another folder")


def _at_once(recipe: Recipe, keep: int | None) -> int:
    """Return how many checkpoints exist at the same time. keep: checkpointing.keep_top_k."""
    checkpointing, steps = recipe.checkpointing, config.bound(config.section(recipe).max_num_steps)
    saves = None if steps is None else max(1, math.ceil(steps / checkpointing.save_period))
    if keep is None:
        return saves or LEAST
    at_once = keep + 1 if checkpointing.metric_name else max(keep, 1)  # the latest one, and the best ones
    return min(saves or at_once + 1, at_once + 1)


def _checkpoint(recipe: Recipe, pending: Sequence[os.PathLike], notes: list[str]) -> float | None:
    """Return the bytes of one checkpoint; None if the run writes no checkpoints, or the model is not known yet."""
    if not recipe.checkpointing.enabled:
        return None
    models = config.models(recipe)
    total = 0.0
    for section in ("policy", "value"):
        if section in models:
            count = _parameters(recipe, section, pending, trained=True)
            if count is None:
                note = f"room for checkpoints was not checked: the size of the model of {section}.model_name is not known"
                notes += [note] if architecture.asks_description(recipe) else []
                return None
            total += saved_bytes(models[section], count)
    if recipe.checkpointing.save_consolidated:
        total += (_parameters(recipe, "policy", pending, trained=False) or 0) * PRECISIONS[recipe.policy.precision]
    return total


def saved_bytes(policy: PolicyConfig, parameters: int) -> float:
    """Return the bytes of a trained model in a checkpoint. parameters: the number of trained parameters."""
    return 4 * (1 + _states(policy)) * parameters


def _parameters(recipe: Recipe, section: str, pending: Sequence[os.PathLike], trained: bool) -> int | None:
    """Return the number of a model's parameters; None if it is not known.

    trained: whether to count only trained parameters. With LoRA these are the adapters, which are assumed for every linear
    layer.
    """
    policy = config.models(recipe)[section]
    lora, describes = adapters(policy) if trained else None, architecture.is_described(recipe)
    listed = _tensors(f"{section}.model_name", policy, pending, describes)
    model_tensors = [tensor for tensor in listed if tensor.part != "buffer"]
    if lora:
        linear = (tensor for tensor in model_tensors if tensor.part in ADAPTED and len(tensor.shape) == 2)
        return sum(lora.dim * sum(tensor.shape) for tensor in linear) or None
    return sum(tensor.numel for tensor in model_tensors) or None


def _tensors(key: str, policy: PolicyConfig, pending: Sequence[os.PathLike], describes: bool) -> list[Tensor]:
    """Return a model's tensors: of its weight files if they are here, else as transformers `describes` them; otherwise []."""
    with collected([]):  # other checks report errors
        if not (policy.random_init or is_inside(policy.model_name, pending)) and is_local(policy.model_name):
            weight_files = read_weight_files(model_folder(key, policy.model_name))
            if weight_files.tensors and not weight_files.faults:
                return [described(name, stored.shape) for name, stored in unpacked(weight_files.tensors).items()]
        model = planning_config(policy, pending, key) if describes else None
        return tensors(model) if model else []
    return []


def _states(policy: PolicyConfig) -> int:
    """Return the number of optimizer states per weight."""
    if uses_megatron(policy):
        return 2
    optimizer: OptimizerConfig = policy.optimizer
    name, kwargs = optimizer.name.rpartition(".")[2], optimizer.kwargs
    count = STATES.get(name, 2) + bool(kwargs.get("amsgrad"))
    return count + (name in ("SGD", "RMSprop") and bool(kwargs.get("momentum")))
