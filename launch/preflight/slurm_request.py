"""What each component asks of Slurm, as sbatch will read it: the recipe, and the variables that go before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from launch.components import components
from launch.nodes import SLURMS_DEFAULT, groups, hosts, memory, takes_turns, takes_whole_nodes
from launch.preflight.slurm_cluster import megabytes, minutes
from pipeline.config import Recipe, ranks_per_node

VARIABLES = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}
"""sbatch takes these for every component, and before what the batch script says. See sbatch(1), INPUT ENVIRONMENT VARIABLES."""


@dataclass(frozen=True)
class Request:
    """Describes what one component asks for, together with those that share its nodes."""

    key: str  # cluster.train
    together: tuple[str, ...]  # the keys of the components whose needs are added up, itself the first
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
    options: dict[str, str | None]  # more of sbatch's

    def keys(self, name: str) -> str:
        """Return the keys whose values add up to what is asked for."""
        return " + ".join(f"{key}.{name}" for key in self.together)


def requests(recipe: Recipe) -> list[Request]:
    """In the job's order, of components that have nodes of their own."""
    found, parts = [], components(recipe)
    for (name, component), names in zip(hosts(parts).items(), groups(parts), strict=True):
        given = {key: os.environ.get(variable) or getattr(component, key) for key, variable in VARIABLES.items()}
        partition = given.pop("partition")
        found.append(
            Request(
                key=f"cluster.{name}",
                together=tuple(f"cluster.{each}" for each in names if not takes_turns(parts[each])),
                nodes=component.nodes,
                minutes=recipe.cluster.time_min,
                ranks_per_node=ranks_per_node(component),
                cpus=ranks_per_node(component) * (component.cpus_per_task or 1),
                gpus=component.gpus_per_node,
                memory_mb=_memory(memory(component)) or 0,
                all_memory=memory(component) == "0",
                partitions=tuple(partition.split(",")) if partition else (),
                whole=takes_whole_nodes(component),
                options=component.sbatch_options,
                **given,
            )
        )
    return found


def problems(recipe: Recipe) -> Iterator[str]:
    """What sbatch would not read as the recipe says it."""
    for name, component in hosts(components(recipe)).items():
        for key, variable in VARIABLES.items():
            ours, theirs = getattr(component, key), os.environ.get(variable)
            if ours and theirs and ours != theirs:
                yield (
                    f"cluster.{name}.{key}: {ours}, but {variable}={theirs} in the environment, and sbatch takes that; unset"
                    f" it, or {key}={theirs}"
                )
        if _memory(memory(component)) is None:
            yield (
                f"cluster.{name}.mem: '{component.mem}' is not an amount of memory such as 500G; 0 takes all of a node's, and"
                f" {SLURMS_DEFAULT} what Slurm gives"
            )
    limit = os.environ.get("SBATCH_TIMELIMIT")
    if limit and _minutes(limit) != recipe.cluster.time_min:
        yield (
            f"cluster.time_min: {recipe.cluster.time_min}, but SBATCH_TIMELIMIT={limit} in the environment, and sbatch takes"
            " that; unset it"
        )


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


def _memory(text: str | None) -> float | None:
    try:
        return megabytes(text or "0")
    except ValueError:
        return None
