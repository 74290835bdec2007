"""Place a local run's ranks on this machine's GPUs, if its recipe sets no `gpus_per_node`.

The first of these placements is chosen for which the machine has enough GPUs and which fits the recipe's layout and batches:
    separate     a GPU for each rank
    colocated    train and generate ranks use the same GPUs in turn; the train ranks serve a reward model, and rollouts are
                 synchronous
    smaller      colocated with fewer ranks, or training alone with fewer ranks
A placement never changes keys that the command line sets. Without GPUs, or with a CPU build of torch, the ranks run on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

from launch.executors import gpus, selection
from launch.executors.components import components
from launch.executors.nodes import groups, hosts, shares_gpus
from launch.plan import backend_choice
from launch.terminal.units import plural
from pipeline import config
from pipeline.algorithms.ahead import key_in
from pipeline.config import Loaded, Problem, Recipe, RecipeError, collected, config_tree, hardware, ranks, ranks_per_node
from pipeline.config.cluster import SHARED

Changes = dict[str, Any]
"""Dotted key -> its new value."""


def place_on_gpus(loaded: Loaded) -> Loaded:
    """Return the recipe with this machine's GPUs for its ranks, and with a note that names the changed keys.

    Return it unchanged if it sets gpus_per_node, has problems or does not run locally, or if ranks cannot use GPUs here. Return
    it with a problem if no placement is valid.
    """
    is_placed = any(key.startswith("cluster.") and key.endswith(".gpus_per_node") for key in loaded.origins)
    if is_placed or loaded.problems or not torch_has_cuda() or selection.choose(loaded.recipe).name != "local":
        return loaded
    devices, source = gpus.usable()
    if not devices:
        return loaded
    try:
        # Without GPUs the choice does not read the model's files, which a needed run may be still to write.
        _, choice = backend_choice.choose(loaded.recipe)
    except RecipeError:  # `prepare` reports it
        return loaded
    without = {
        name: replace(getattr(loaded.recipe.cluster, name), sbatch_options={})
        for name in ("generate", "reward", "judge", "environment")
    }
    # A local run has no Slurm options.
    without_slurm = replace(loaded.recipe, cluster=replace(loaded.recipe.cluster, **without))
    available, refused = f"{plural(len(devices), 'GPU')} according to {source}", ""
    for changes in candidates(loaded, len(devices)):
        with collected(problems := []):
            recipe = config.changed(without_slurm, changes)
            config.validate(config.with_backend(recipe, choice.backend) if choice else recipe)
        if not problems:
            overrides = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
            note = f"this machine has {available}: {overrides}; set cluster.*.gpus_per_node to place the ranks yourself"
            return replace(loaded, recipe=recipe, notes=[*loaded.notes, note])
        refused = refused or f": {problems[0]}"
    key = f"cluster.{'train' if config.trains(loaded.recipe) else 'generate'}.gpus_per_node"
    message = f"no placement of the recipe fits this machine's {available}{refused}. Try a smaller layout, or {key}=0 for CPUs"
    return replace(loaded, problems=[Problem(key, "too-large", message)])


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if only some components have GPUs, since some ranks would then use NCCL and others gloo."""
    parts = config.model_components(recipe)
    without = [name for name, part in parts.items() if not part.gpus_per_node]
    if 0 < len(without) < len(parts):
        having = ", ".join(f"cluster.{name}" for name in parts if name not in without)
        key = f"cluster.{without[0]}.gpus_per_node"
        message = f"got 0; expected GPUs, because {having} has GPUs and all ranks communicate over NCCL. Try {key}=1"
        yield Problem(key, "needs-gpu", message)


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each set of nodes whose gpus_per_node exceeds the usual number in `recipes/hardware/`.

    Slurm is not queried.
    """
    parts = components(recipe)
    for names, host in zip(groups(parts), hosts(parts).values(), strict=True):
        usual = hardware.gpu_value(host.gpu, "nvlink_gpus")
        if not hardware.gpu_value(host.gpu, "nvlink_crosses_nodes") and host.gpus_per_node > usual:
            keys = " + ".join(f"cluster.{name}.gpus_per_node" for name in names if not shares_gpus(parts[name]))
            yield f"{keys}: got {host.gpus_per_node} on each node; nodes with {host.gpu} usually have {usual}"


def torch_has_cuda() -> bool:
    """Return whether the installed torch is a GPU build, as its version tells. Importing torch would take seconds."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def candidates(loaded: Loaded, available: int) -> Iterator[Changes]:
    """Yield the changes of each placement that gives every rank a GPU, the best placement first.

    available: the number of this machine's GPUs, at least 1.
    """
    for changes in _candidates(loaded.recipe, available):
        changing = differing(loaded.recipe, changes)
        if not any(loaded.origins.get(key) == config_tree.COMMAND_LINE for key in changing):
            yield changing


def differing(recipe: Recipe, changes: Changes) -> Changes:
    """Return those of the changes whose value differs from the recipe's present value."""
    tree = config_tree.from_plain(recipe, None)
    return {key: value for key, value in changes.items() if getattr(tree.find(key), "value", None) != value}


def _candidates(recipe: Recipe, available: int) -> Iterator[Changes]:
    parts = components(recipe)
    parts.pop("environment", None)
    per_node = {name: ranks_per_node(part) for name, part in parts.items()}
    shared = [name for name in ("train", "generate") if name in parts]
    if any(map(shares_gpus, parts.values())):
        per_node |= dict.fromkeys(shared, max(per_node[name] for name in shared))
    owners = [name for name, part in parts.items() if not shares_gpus(part)]
    if sum(parts[name].nodes * per_node[name] for name in owners) <= available:
        yield {f"cluster.{name}.gpus_per_node": count for name, count in per_node.items()}
    sharing = colocation(recipe) if len(shared) > 1 else {}
    if "judge" in parts:
        sharing |= {"cluster.judge.gpus_per_node": per_node["judge"]}
        available -= parts["judge"].nodes * per_node["judge"]
    for count in range(min(available, *(ranks(parts[name]) for name in shared)), 0, -1):
        sizes = {"nodes": 1, "ranks_per_node": count, "gpus_per_node": count}
        yield {**sharing, **{f"cluster.{name}.{key}": size for name in shared for key, size in sizes.items()}}


def colocation(recipe: Recipe) -> Changes:
    """Return the changes with which train and generate ranks use the same GPUs in turn, and no reward model has its own."""
    changes: Changes = {"policy.generation.colocated.enabled": True, "cluster.share_nodes": False}
    changes |= {f"cluster.generate.{key}": getattr(recipe.cluster.train, key) for key in SHARED}
    if config.serves_rewards(recipe):
        name = config.reward_environment(recipe)
        changes |= {f"env.{name}.served_by": "train", f"env.{name}.cpu_offload": True}
    if config.runs_ahead(recipe):
        changes[f"{key_in(config.section(recipe), recipe.algorithm)}.enabled"] = False
    return changes
