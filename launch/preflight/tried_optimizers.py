"""Try a recipe's optimizers on small tensors before a job, where a plan is made: their options, their step and their state.

torch's optimizers take a step in this process. Others do so in a process of their own, as libraries may need GPUs or print. A
user's class is imported only from folders that the user trusts (`launch/recipes/trust.py`). The ranks repeat the trial before
they load weights, on tensors that are sharded like the model's.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launch.preflight import user_imports
from launch.preflight.signatures import module_spec
from launch.recipes import trust
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import OptimizerConfig, Problem, Recipe, RecipeError, uses_megatron

MODULE = "pipeline.train.optimizer_trial"
TORCH = "torch.optim."


@dataclass(frozen=True)
class OptimizerTrial:
    """The outcome of the trial of an optimizer."""

    problems: tuple[Problem, ...] = ()  # with the keys of `policy.optimizer`
    state_bytes: tuple[float, float] | None = None  # per element of (matrices, other parameters); None: not known
    untried: str = ""  # why there was no trial


def optimizers(recipe: Recipe) -> dict[str, OptimizerConfig]:
    """Return section -> optimizer of the models that FSDP2 trains."""
    if not config.trains(recipe) or uses_megatron(recipe.policy):
        return {}
    return {"policy": recipe.policy.optimizer} | ({"value": recipe.value.optimizer} if build(recipe).needs.critic else {})


def problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield the problems of the optimizers. notes: receives why one was not tried."""
    for section, optimizer in optimizers(recipe).items():
        trial = try_on_this_machine(recipe, optimizer)
        yield from (replace(p, key=p.key.replace("policy.", f"{section}.", 1)) for p in trial.problems)
        if trial.untried:
            notes.append(f"{section}.optimizer: {optimizer.name} was not tried: {trial.untried}")


def try_on_this_machine(recipe: Recipe, optimizer: OptimizerConfig) -> OptimizerTrial:
    """Return the outcome of a trial. A second trial of the same code with the same options costs nothing."""
    text = json.dumps([optimizer.name, optimizer.kwargs], default=str)
    if optimizer.name.startswith(TORCH):
        return _try_here(text)
    top, folders = optimizer.name.partition(".")[0], user_imports.searched(recipe)
    given = trust.current(dry=True)
    trusted = trust.trusted_folders(given, folders)
    if module_spec(top, folders) is None or top in sys.stdlib_module_names:
        return OptimizerTrial(untried="it is not installed here; the ranks of cluster.train may have it")
    if any(_holds(folder, top) for folder in folders if folder not in trusted):
        return OptimizerTrial(untried="its code is not trusted. Try trust=true if you trust this recipe")
    if given is trust.Trust.NOTHING:
        return OptimizerTrial(untried="this service imports no packages for a request")
    several = config.ranks(recipe.cluster.train) > 1 or recipe.policy.precision != "float32"
    spec = module_spec(optimizer.name.rpartition(".")[0], folders)
    edited = os.stat(spec.origin).st_mtime_ns if spec and spec.origin and os.path.isfile(spec.origin) else 0
    return _try_apart(text, tuple(map(str, trusted)), several, config.has_gpus(recipe), edited)


def _holds(folder: Path, top: str) -> bool:
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


@functools.lru_cache(maxsize=64)
def _try_here(text: str) -> OptimizerTrial:
    try:
        from pipeline.train.optimizer_trial import in_world_of_one  # imports torch, which submission may lack
    except ImportError as error:
        return OptimizerTrial(untried=f"{error.name} is not installed here")
    try:
        return OptimizerTrial(state_bytes=in_world_of_one(OptimizerConfig(*json.loads(text)), sharded=False))
    except RecipeError as error:
        return OptimizerTrial(tuple(error.problems))


@functools.lru_cache(maxsize=64)
def _try_apart(text: str, folders: tuple[str, ...], sharded: bool, gpus: bool, edited: int) -> OptimizerTrial:
    """Return the outcome of a trial in a process of its own. edited: when the module was, so that a notebook sees changes."""
    name, kwargs = json.loads(text)
    request = {"folders": folders, "sharded": sharded, "gpus": gpus, "name": name, "kwargs": kwargs}
    python_path = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    reply, why = user_imports.ask(MODULE, request, [*python_path])
    if reply is None:
        return OptimizerTrial(untried=why)
    found, state = tuple(Problem(*problem) for problem in reply["problems"]), reply["bytes"]
    if found and gpus and reply["device"] == "cpu" and found[0].key.endswith(".name"):
        return OptimizerTrial(untried=f"it may need a GPU, and none is here ({found[0].message})")
    return OptimizerTrial(found, (state[0], state[1]) if state else None)
