"""Check that the disks have room for a run's checkpoints.

A checkpoint of either backend holds the float32 weight of each trained parameter and the optimizer's states of the same size in
float32: two for Adam and its variants, and for unknown optimizers. Leaves out: replicas that all tensor-parallel ranks write
(norms), random states and JSON, together less than 1%; quotas that do not show as free space; writes of other jobs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.preflight import architecture
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
    ranks,
    uses_megatron,
)
from pipeline.models.tensors import Tensor, described, tensors
from pipeline.models.weight_files import read_weight_files

STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Rprop": 2}  # per weight; others: 2. With momentum SGD, RMSprop: one more
ADAPTED = ("attention", "mlp", "shared", "routed")  # parts of a model with linear layers that get adapters
LEAST = 2  # checkpoints on disk: one that is kept, and one that is being written


@dataclass(frozen=True)
class PlannedWrite:
    """Data that the run will write."""

    folder: Path  # may not exist yet
    nbytes: float
    files: int
    description: str
    key: str


def problems(recipe: Recipe, pending: Sequence[os.PathLike], notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each disk with too little room.

    notes: receives disks that may have too little room, and checks that were not possible.
    """
    if not config.trains(recipe):
        return
    uses: list[PlannedWrite] = []
    checkpoint = _checkpoint(recipe, pending, notes)
    run_dir = Path(recipe.run_dir).absolute()
    if checkpoint:
        keep = recipe.checkpointing.keep_top_k
        uses.append(_checkpoints(recipe, run_dir, checkpoint, keep))
        if keep is None and config.bound(config.section(recipe).max_num_steps) is None:
            notes.append(
                f"checkpointing.keep_top_k: null keeps every checkpoint, {size(checkpoint)} each, and their number"
                f" is not known without {recipe.algorithm}.max_num_steps; room was checked for {LEAST}"
            )
    disks: dict[int, list[PlannedWrite]] = {}
    for use in uses:
        disks.setdefault(_device(use.folder), []).append(use)
    for disk in disks.values():
        yield from _of_one_disk(recipe, disk, checkpoint)


def nearest_existing(path: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def _device(path: Path) -> int:
    return nearest_existing(path).stat().st_dev


def _of_one_disk(recipe: Recipe, uses: list[PlannedWrite], checkpoint: float | None) -> Iterator[Problem]:
    folder = nearest_existing(uses[0].folder)
    disk = os.statvfs(folder)
    if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):  # file_systems.py reports this
        return
    free, nbytes, files = disk.f_bavail * disk.f_frsize, sum(use.nbytes for use in uses), sum(use.files for use in uses)
    key, terms = max(uses, key=lambda use: use.nbytes).key, "; ".join(use.description for use in uses)
    if nbytes > free:
        message = f"{size(free)} are free on the file system of {folder}, and this run will write {size(nbytes)} there: {terms}"
        yield Problem(key, "no-space", f"{message}. Try {_fewer(recipe, uses, checkpoint, free) or 'another folder'}")
    elif disk.f_files and files > disk.f_favail:
        message = f"the file system of {folder} has room for {disk.f_favail} more files, and this run will write {files} there"
        yield Problem(key, "no-space", f"{message}. Try another folder")


# ---- checkpoints --------------------------------------------------------------------------------------------------------


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
                return [described(name, stored.shape) for name, stored in weight_files.tensors.items()]
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


def _checkpoints(recipe: Recipe, run_dir: Path, nbytes: float, keep: int | None) -> PlannedWrite:
    """Return the planned write of checkpoints: as many as exist at the same time, less the bytes already on disk.

    nbytes: size of one checkpoint. keep: checkpointing.keep_top_k.
    """
    at_once = _at_once(recipe, keep)
    existing = _existing_bytes(run_dir)
    writers = ranks(recipe.cluster.train) * len({"policy", "value"} & config.models(recipe).keys())
    consolidated = ", checkpointing.save_consolidated" if recipe.checkpointing.save_consolidated else ""
    return PlannedWrite(
        folder=run_dir / "checkpoints",
        nbytes=max(0.0, at_once * nbytes - existing),
        files=at_once * (2 * writers + 2),
        description=f"{at_once} checkpoints of {size(nbytes)} at once (checkpointing.keep_top_k={keep}{consolidated})"
        + (f", of which {size(existing)} are on the disk" if existing else ""),
        key="run_dir",
    )


def _existing_bytes(run_dir: Path) -> int:
    """Return the bytes of the checkpoints already on disk."""
    return sum(path.stat().st_size for path in run_dir.glob("checkpoints/step_*/**/*") if path.is_file())


def _at_once(recipe: Recipe, keep: int | None) -> int:
    checkpointing, steps = recipe.checkpointing, config.bound(config.section(recipe).max_num_steps)
    saves = None if steps is None else max(1, math.ceil(steps / checkpointing.save_period))
    if keep is None:
        return saves or LEAST
    at_once = keep + 1 if checkpointing.metric_name else max(keep, 1)  # the latest one, and the best ones
    return min(saves or at_once + 1, at_once + 1)


def _fewer(recipe: Recipe, uses: list[PlannedWrite], checkpoint: float | None, free: int) -> str | None:
    of_run = [use for use in uses if use.key == "run_dir"]
    if not of_run:
        return None
    other_bytes = sum(use.nbytes for use in uses if use not in of_run)
    assert checkpoint is not None  # uses of run_dir are checkpoints
    at_once = int((free - other_bytes + _existing_bytes(Path(recipe.run_dir).absolute())) // checkpoint)
    keep = at_once - (2 if recipe.checkpointing.metric_name else 1)  # the inverse of `_at_once`
    if keep > 0:
        return f"checkpointing.keep_top_k={keep}, which fits, or another run_dir"
    return "another run_dir, or checkpointing.enabled=false"
