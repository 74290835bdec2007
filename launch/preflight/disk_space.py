"""Check that the disks have room for a run's checkpoints.

A checkpoint of either backend holds the float32 weight of each trained parameter and the optimizer's states of the same size in
float32: two for Adam and its variants, and for unknown optimizers. Leaves out: replicas that all tensor-parallel ranks write
(norms), random states and JSON, together less than 1%; quotas that do not show as free space; writes of other jobs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
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


def problems(recipe: Recipe, pending: Sequence[os.PathLike], notes: list[str]) -> Iterator[Problem]:
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


def nearest_existing(path: Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


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
