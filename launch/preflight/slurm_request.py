"""Describe each component's request as sbatch gets it: from the recipe, or else from environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launch.executors import slurm_environment
from launch.executors.components import components
from launch.executors.nodes import NODE_KEYS, groups, hosts, memory, shares_gpus, takes_whole_nodes
from launch.executors.slurm import request_options
from launch.executors.slurm_client import megabytes
from pipeline.config import ComponentConfig, Recipe, ranks_per_node

KEYS = {
    "ntasks-per-node": "ranks_per_node",
    **{name: name.replace("-", "_") for name in ("nodes", "cpus-per-task", "gpus-per-node", "mem", "exclusive", *NODE_KEYS)},
}
"""Option of sbatch -> key of a component."""


@dataclass(frozen=True, eq=False)
class ComponentRequest:
    """The request of one component and of the components that share its nodes."""

    key: str  # cluster.train
    together: tuple[str, ...]  # keys of the components whose resources are added up, itself first
    options: tuple[str, ...]  # of sbatch, as in the batch script
    own_options: frozenset[str]  # names of sbatch_options set for this component only
    variables: frozenset[str]  # names of options that variables of the environment set
    host: ComponentConfig
    minutes: int
    cpus: int  # on each node, at least
    gpus: int  # on each node
    memory_mb: float  # on each node; 0: not set, or all

    @property
    def partitions(self) -> list[str]:
        """Return the alternative partitions; [] for Slurm's default."""
        return self.host.partition.split(",") if self.host.partition else []

    @property
    def features(self) -> list[str]:
        """Return the names of features in the constraint."""
        return re.findall(r"[\w.-]+", self.host.constraint or "")

    def keys(self, name: str) -> str:
        """Return the keys `name` of all components whose values add up to the request, as `KEY + KEY`."""
        return " + ".join(f"{key}.{name}" for key in self.together)

    def key_of(self, option: str) -> str:
        """Return the recipe's key or environment variable that sets an option of sbatch: `--mem=3G` -> cluster.train.mem."""
        name = option_name(option)
        if name in self.variables:
            return slurm_environment.variable(name)
        if name in ("time", "signal"):
            return "cluster.time_min"
        if name == "job-name":
            return "name"
        if name in KEYS:
            return f"{self.key}.{KEYS[name]}"
        return f"{self.key if name in self.own_options else 'cluster'}.sbatch_options.{name}"


def option_name(option: str) -> str:
    """Return the name in an option: `--mem=3G` -> mem."""
    return option[2:].partition("=")[0]


def requests(recipe: Recipe) -> list[ComponentRequest]:
    """Return the requests of the components with nodes of their own, in the job's order."""
    requests, parts = [], components(recipe)
    for (name, host), names in zip(hosts(parts).items(), groups(parts), strict=True):
        options = tuple(request_options(recipe.name, recipe.cluster, host))
        variables = frozenset(slurm_environment.chosen_wishes(host))
        host = slurm_environment.with_wishes(host)
        requests.append(
            ComponentRequest(
                key=f"cluster.{name}",
                together=tuple(
                    f"cluster.{component_name}" for component_name in names if not shares_gpus(parts[component_name])
                ),
                options=options,
                own_options=frozenset(getattr(recipe.cluster, name).sbatch_options),
                variables=variables,
                host=host,
                minutes=recipe.cluster.time_min,
                cpus=ranks_per_node(host) * (host.cpus_per_task or 1),
                gpus=host.gpus_per_node,
                memory_mb=_memory(memory(host)),
            )
        )
    return requests


def notes(recipe: Recipe) -> Iterator[str]:
    """Yield notes on environment variables, and on components with GPUs whose CPUs or memory are left to Slurm's defaults."""
    yield from slurm_environment.notes(hosts(components(recipe)))
    for name, component in hosts(components(recipe)).items():
        open_keys = [key for key in ("cpus_per_task", "mem") if getattr(component, key) is None]
        if component.gpus_per_node and not takes_whole_nodes(component) and open_keys:
            yield (
                f"cluster.{name}.{', '.join(open_keys)}: got null with exclusive=false; Slurm then gives its defaults,"
                f" which may be one CPU for each rank and little memory. Try a value, or cluster.{name}.exclusive=true"
            )


def _memory(text: str | None) -> float:
    try:
        return megabytes(text or "0")
    except ValueError:  # sbatch refuses it
        return 0
