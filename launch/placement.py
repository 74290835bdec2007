"""Which GPUs of this machine a local run takes, where its recipe gives no `gpus_per_node`.

The first that the machine has enough GPUs for, and that fits the recipe's layout and batches:
    apart        a GPU for each rank
    colocated    train and generate ranks take turns on the same GPUs; a reward model is served by the train ranks, and
                 asynchronous rollouts are made between the steps
    smaller      the same with fewer ranks, and training alone with fewer ranks
Without GPUs the ranks run on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launch import backend, executor, gpus
from launch.job import Guest, components
from launch.units import plural
from pipeline import config
from pipeline.config import Loaded, Recipe, collected, ranks, ranks_per_node

Changes = dict[str, Any]
"""Values by dotted key."""


def placed(loaded: Loaded) -> Loaded:
    """Return the recipe with this machine's GPUs for its ranks, and a note that names the keys that do so."""
    asks = any(key.startswith("cluster.") and key.endswith(".gpus_per_node") for key in loaded.origins)
    if asks or loaded.problems or executor.choose(loaded.recipe).name != "local":
        return loaded
    devices, source = gpus.usable()
    if not devices:
        return loaded
    refused: list[str] = []
    for changes in candidates(loaded.recipe, len(devices)):
        with collected(found := []):
            _, choice = backend.choose(
                loaded.recipe
            )  # on CPUs: with GPUs the choice looks at the model, which may be made first
            recipe = config.changed(loaded.recipe, changes)
            config.validate(config.decided(recipe, choice.backend))
        if found:
            refused += found
            continue
        given = " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        note = f"{plural(len(devices), 'GPU')} by {source}: {given}; give cluster.*.gpus_per_node to place the ranks yourself"
        return replace(loaded, recipe=recipe, notes=[*loaded.notes, note])
    return replace(loaded, problems=[f"{plural(len(devices), 'GPU')} by {source} are too few: {refused[0]}"])


def candidates(recipe: Recipe, there: int) -> Iterator[Changes]:
    """Changes that give each rank a GPU, the best first. there: how many GPUs the machine has, at least 1."""
    parts = components(recipe)
    if sum(ranks(part) for part in parts.values() if not isinstance(part, Guest)) <= there:
        yield {f"cluster.{name}.gpus_per_node": ranks_per_node(part) for name, part in parts.items()}
    if "generate" not in parts:
        shared, sharing = ("train",), {}
    else:
        shared, sharing = ("train", "generate"), _turns(recipe)
    for count in range(min(there, *(ranks(parts[name]) for name in shared)), 0, -1):
        sizes = {"nodes": 1, "ranks_per_node": count, "gpus_per_node": count}
        yield {**sharing, **{f"cluster.{name}.{key}": size for name in shared for key, size in sizes.items()}}


def _turns(recipe: Recipe) -> Changes:
    """What lets train and generate ranks have the same GPUs in turn."""
    changes: Changes = {"policy.generation.colocated.enabled": True}
    if config.serves_rewards(recipe):
        name = config.reward_environment(recipe)
        changes |= {f"env.{name}.served_by": "train", f"env.{name}.cpu_offload": True}
    if recipe.algorithm == "grpo" and config.runs_ahead(recipe):
        changes["grpo.async_grpo.enabled"] = False
    return changes
