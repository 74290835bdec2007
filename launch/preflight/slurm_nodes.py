"""Read the partitions and nodes of a cluster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from launch.executors.nodes import memory, takes_whole_nodes
from launch.executors.slurm_client import Fields, configuration, gpus, parse_records, run_command
from launch.preflight.slurm_request import ComponentRequest

UNAVAILABLE = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "UNKNOWN", "NOT_RESPONDING")
)
"""States in which a node takes no jobs until an administrator repairs it."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node's resources and state."""

    name: str
    cpus: int
    memory_mb: int  # available to jobs
    gpus: int
    features: frozenset[str]
    partitions: frozenset[str]
    available: bool  # False in a state of UNAVAILABLE


class Cluster:
    """The cluster's settings, partitions and nodes, read from Slurm when created. Raises SlurmError."""

    def __init__(self) -> None:
        self.config = configuration()
        # -a: includes partitions hidden from this user, who may still request them
        records = parse_records(run_command("scontrol", "-a", "-o", "show", "partition"))
        self.partitions = {fields["PartitionName"]: fields for fields in records}

    @cached_property
    def nodes(self) -> dict[str, ClusterNode]:
        """Return name -> node for all nodes, which are read on first use. Raises SlurmError."""
        nodes = map(_node, parse_records(run_command("scontrol", "-a", "-o", "show", "node")))
        return {node.name: node for node in nodes}

    @property
    def enforced_parts(self) -> frozenset[str]:
        """Return the parts of accounting that Slurm enforces: associations, limits, qos, safe."""
        return frozenset(self.config.get("AccountingStorageEnforce", "none").lower().split(","))

    def names(self, request: ComponentRequest) -> list[str]:
        """Return the names of a request's partitions that exist; Slurm's default partition if the request names none."""
        default = [name for name, fields in self.partitions.items() if fields.get("Default") == "YES"]
        return [name for name in request.partitions or default if name in self.partitions]

    def partition(self, request: ComponentRequest) -> Fields:
        """Return the first existing partition of a request."""
        return self.partitions[self.names(request)[0]]

    def least_nodes(self, request: ComponentRequest) -> int:
        """Return the minimum number of nodes of a job in the request's partitions."""
        return max(1, min((int(self.partitions[name].get("MinNodes", 1)) for name in self.names(request)), default=1))

    def members(self, request: ComponentRequest) -> list[ClusterNode]:
        """Return the nodes in the request's partitions."""
        names = set(self.names(request))
        return [node for node in self.nodes.values() if names & node.partitions]

    def may_return(self, request: ComponentRequest) -> set[str]:
        """Return the names of unavailable nodes whose resources would satisfy a request."""
        needs, features = (request.cpus, request.gpus, request.memory_mb), set(request.features)
        return {
            node.name
            for node in self.members(request)
            if not node.available
            and all(has >= need for has, need in zip((node.cpus, node.gpus, node.memory_mb), needs, strict=True))
            and (not features or features & node.features)
        }


def _node(fields: Fields) -> ClusterNode:
    features = fields.get("AvailableFeatures", "(null)")
    states = {state.strip("*~#!%$@^-") for state in fields["State"].split("+")}
    return ClusterNode(
        name=fields["NodeName"],
        cpus=int(fields.get("CPUEfctv") or fields["CPUTot"]),
        memory_mb=int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", 0)),
        gpus=gpus(fields.get("Gres", "")),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        partitions=frozenset(fields.get("Partitions", "").split(",")),
        available=not states & UNAVAILABLE and "*" not in fields["State"],
    )


def count_whole_nodes(request: ComponentRequest, cluster: Cluster, names: Collection[str]) -> ComponentRequest:
    """Return the request as limits count it: a whole node counts with all its CPUs and GPUs, mem=0 with all its memory.

    names: names of suitable nodes, whose smallest values are taken.
    """
    nodes = [cluster.nodes[name] for name in names if name in cluster.nodes]
    if memory(request.host) == "0" and nodes:
        request = replace(request, memory_mb=min(node.memory_mb for node in nodes))
    if takes_whole_nodes(request.host) and nodes:
        request = replace(request, cpus=min(node.cpus for node in nodes), gpus=min(node.gpus for node in nodes))
    return request
