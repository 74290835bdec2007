"""Read a recipe that another recipe needs, with the cluster keys that it inherits.

A needed recipe merges these sources, each of which overrides the sources above it:
    the schema's defaults
    the requested recipe's files: cluster.* of SHARED, and each component's keys of SITE
    its own files
    every cluster.* of the command line; the keys of SIZES only if its layout allows them
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launch.plan import backend_choice
from launch.recipes import reading
from pipeline import config
from pipeline.config import Loaded, Problem, collected, components_on_train_nodes, config_tree

SITE = (
    *("partition", "account", "qos", "constraint", "sbatch_options", "python", "srun_args", "env_vars"),
    *("container_image", "container_mounts", "container_workdir", "container_args"),
)
"""Keys that say where a component runs. Each recipe has its own sizes and time limit."""
SHARED = ("executor", "sbatch_options", "container_runtime")
"""Keys of all components that say where they run."""
SIZES = ("share_nodes", "ranks_per_node", "cpus_per_task", "gpus_per_node", "nodes")


def inspect(need: str, own_overrides: list[str], requested: Loaded, command_line: list[str]) -> Loaded:
    """Return a needed recipe with its inherited overrides. A note names inherited sizes that do not fit it and are left out.

    own_overrides: the needed recipe's overrides. requested: the recipe that the user requested, with the overrides
    `command_line`.
    """
    alone = reading.inspect(need, own_overrides)
    where = _from_files(requested, alone)
    cluster_arguments = [argument for argument in command_line if argument.startswith(("cluster.", "cluster="))]
    if not where and not cluster_arguments:
        return alone
    before = _problems(alone)
    tried = [
        replace(reading.inspect(need, [*own_overrides, *where, *cluster_arguments]), inherited=(*where, *cluster_arguments))
    ]
    for left_out in (SIZES[-1:], SIZES):
        if not (new := [problem for problem in _problems(tried[-1]) if problem not in before]):
            return tried[-1]
        fitting = [argument for argument in cluster_arguments if argument.partition("=")[0].rpartition(".")[2] not in left_out]
        loaded = reading.inspect(need, [*own_overrides, *where, *fitting])
        dropped = ", ".join(argument for argument in cluster_arguments if argument not in fitting)
        note = f"{dropped}: not inherited by {loaded.recipe.name}, because of this problem: {new[0]}"
        tried.append(replace(loaded, notes=[*loaded.notes, note], inherited=(*where, *fitting)))
    return tried[-1] if len(_problems(tried[-1])) < len(_problems(tried[0])) else tried[0]


def _problems(loaded: Loaded) -> list[Problem]:
    problems = list(loaded.problems)
    if not problems:
        with collected(problems):
            backend_choice.choose(loaded.recipe)
    return problems


def _from_files(requested: Loaded, needed: Loaded) -> list[str]:
    """Return `key=value` for the keys of the site that the requested recipe's files set and the needed recipe's do not."""
    values: dict[str, Any] = {}
    for key, origin in requested.origins.items():
        section, *rest = key.split(".")
        if section != "cluster" or not rest or origin == config_tree.COMMAND_LINE:
            continue
        if rest[0] in SHARED:
            values[f"cluster.{rest[0]}"] = getattr(requested.recipe.cluster, rest[0])
        elif rest[1:2] == ["sbatch_options"] and rest[0] in components_on_train_nodes(needed.recipe):
            continue  # it has no nodes of its own there
        elif len(rest) > 1 and rest[1] in SITE:
            component = getattr(requested.recipe.cluster, rest[0], None)
            value = getattr(component, rest[1], None)
            values[f"cluster.{rest[0]}.{rest[1]}"] = value
    own_keys = [f"{key}." for key in needed.origins]
    return [
        config.format_override(key, value)
        for key, value in values.items()
        if not any(o.startswith(f"{key}.") for o in own_keys)
    ]
