"""Describe what each component asks of Slurm, as sbatch will read it: the recipe, and the variables that go before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from launch.components import components
from launch.executors.slurm import request_options
from launch.nodes import groups, hosts, memory, shares_gpus, takes_whole_nodes
from launch.slurm_client import megabytes, minutes
from pipeline.config import ComponentConfig, Problem, Recipe, ranks_per_node

VARIABLES = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}
"""sbatch takes these for every component, and before what the batch script says. See sbatch(1), INPUT ENVIRONMENT VARIABLES."""
KEYS = {
    "ntasks-per-node": "ranks_per_node",
    **{name: name.replace("-", "_") for name in ("nodes", "cpus-per-task", "gpus-per-node", "mem", "exclusive", *VARIABLES)},
}
"""Option of sbatch -> key of a component."""


@dataclass(frozen=True, eq=False)
class ComponentRequest:
    """The request of one component together with those that share its nodes."""

    key: str  # cluster.train
    together: tuple[str, ...]  # the keys of the components whose needs are added up, itself the first
    options: tuple[str, ...]  # of sbatch, as the batch script has them
    own_options: frozenset[str]  # names of the sbatch_options that are the component's own, not all components'
    host: ComponentConfig
    nodes: int
    minutes: int
    ranks_per_node: int
    cpus: int  # on each node, at least
    gpus: int  # on each node
    memory_mb: float  # on each node; 0: nothing is said, or all that there is
    all_memory: bool
    partitions: tuple[str, ...]  # any of them will do; none: Slurm's default
    account: str | None
    qos: str | None
    constraint: str | None
    whole: bool  # no other job may be on the nodes

    def keys(self, name: str) -> str:
        """Return the keys whose values add up to what is asked for."""
        return " + ".join(f"{key}.{name}" for key in self.together)

    def key_of(self, option: str) -> str:
        """Return the recipe's key for an option of sbatch: `--mem=3G` -> cluster.train.mem."""
        name = option_name(option)
        if name in ("time", "signal"):
            return "cluster.time_min"
        if name == "job-name":
            return "name"
        if name in KEYS:
            return f"{self.key}.{KEYS[name]}"
        return f"{self.key if name in self.own_options else 'cluster'}.sbatch_options.{name}"


def option_name(option: str) -> str:
    """`--mem=3G` -> mem."""
    return option[2:].partition("=")[0]


def requests(recipe: Recipe) -> list[ComponentRequest]:
    """Return what the components that have nodes of their own ask for, in the job's order."""
    found, parts = [], components(recipe)
    for (name, host), names in zip(hosts(parts).items(), groups(parts), strict=True):
        given = {key: os.environ.get(variable) or getattr(host, key) for key, variable in VARIABLES.items()}
        partition = given.pop("partition")
        found.append(
            ComponentRequest(
                key=f"cluster.{name}",
                together=tuple(f"cluster.{each}" for each in names if not shares_gpus(parts[each])),
                options=tuple(request_options(recipe.name, recipe.cluster, host)),
                own_options=frozenset(getattr(recipe.cluster, name).sbatch_options),
                host=host,
                nodes=host.nodes,
                minutes=recipe.cluster.time_min,
                ranks_per_node=ranks_per_node(host),
                cpus=ranks_per_node(host) * (host.cpus_per_task or 1),
                gpus=host.gpus_per_node,
                memory_mb=_memory(memory(host)),
                all_memory=memory(host) == "0",
                partitions=tuple(partition.split(",")) if partition else (),
                whole=takes_whole_nodes(host),
                **given,
            )
        )
    return found


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the variables because of which sbatch would not read what the recipe says."""
    for name, host in hosts(components(recipe)).items():
        for key, variable in VARIABLES.items():
            ours, theirs = getattr(host, key), os.environ.get(variable)
            if ours and theirs and ours != theirs:
                yield _overridden(f"cluster.{name}.{key}", ours, variable, theirs, f", or {key}={theirs}")
    limit = os.environ.get("SBATCH_TIMELIMIT")
    if limit and _minutes(limit) != recipe.cluster.time_min:
        yield _overridden("cluster.time_min", recipe.cluster.time_min, "SBATCH_TIMELIMIT", limit)


def _overridden(key: str, ours: object, variable: str, theirs: str, instead: str = "") -> Problem:
    found = f"got {ours}, but sbatch takes {variable}={theirs} of the environment. Try to unset it{instead}"
    return Problem(key, "contradiction", found)


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield what Slurm gives GPUs that do not take whole nodes, where the recipe does not say it."""
    for name, component in hosts(components(recipe)).items():
        open_keys = [key for key in ("cpus_per_task", "mem") if getattr(component, key) is None]
        if component.gpus_per_node and not takes_whole_nodes(component) and open_keys:
            yield (
                f"cluster.{name}.{', '.join(open_keys)}: got null with exclusive=false; Slurm then gives its defaults,"
                f" which may be one CPU for each rank and little memory. Try a value, or cluster.{name}.exclusive=true"
            )


def _minutes(text: str) -> float | None:
    try:
        return minutes(text)
    except ValueError:
        return None


def _memory(text: str | None) -> float:
    try:
        return megabytes(text or "0")
    except ValueError:  # sbatch refuses it
        return 0
