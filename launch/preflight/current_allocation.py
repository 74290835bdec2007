"""Check that the Slurm allocation of this process has room for a recipe: nodes, and on each of them GPUs, CPUs and memory.

Asks `scontrol show job -d` for the job's resources on each node. Partition, account, QOS and constraint of the recipe are not
checked, since the allocation is already granted.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from launch.executors.components import components
from launch.executors.nodes import NODE_KEYS, allocation_options, hosts
from launch.executors.slurm_client import SlurmError, gpus, host_names, run_command
from launch.preflight.slurm_request import ComponentRequest, requests
from launch.terminal.units import plural
from pipeline.config import Problem, Recipe, ranks_per_node

# `Nodes=n[1-2] CPU_IDs=0-7,16 Mem=1024 GRES=gpu:h100:8(IDX:0-7)`; Mem is 0 where Slurm does not hand out memory.
ON_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)")


@dataclass(frozen=True)
class AllocatedNode:
    """A job's resources on one node."""

    name: str
    cpus: int
    memory_mb: int  # 0: not limited
    gpus: int


@dataclass(frozen=True)
class Allocation:
    """The nodes of a Slurm job."""

    job_id: str
    parts: list[list[AllocatedNode]]  # one list for each component of a heterogeneous job, else a single one
    het: bool

    def nodes_of(self, counts: list[int]) -> list[list[AllocatedNode]]:
        """Return each component's nodes, possibly fewer than its count. A plain allocation is split in order."""
        if self.het:
            return [self.parts[k] if k < len(self.parts) else [] for k in range(len(counts))]
        nodes = iter(self.parts[0])
        return [[*itertools.islice(nodes, count)] for count in counts]


def read(job_id: str) -> Allocation:
    """Return a job's allocation. Raises SlurmError."""
    parts = {}
    for line in run_command("scontrol", "show", "job", "-d", "-o", job_id).splitlines():
        if line.startswith("JobId="):
            offset = re.search(r" HetJobOffset=(\d+)", line)
            parts[int(offset[1]) if offset else 0] = [
                AllocatedNode(name, _length(cpus), int(memory), gpus(gres))
                for names, cpus, memory, gres in ON_NODES.findall(line)
                for name in host_names(names)
            ]
    return Allocation(job_id, [parts[k] for k in sorted(parts)], het=len(parts) > 1)


def _length(ids: str) -> int:
    """Return the number of ids in a list: `0-7,16` -> 9."""
    ends = [part.partition("-") for part in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def problems(recipe: Recipe, job_id: str, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each resource that a recipe needs and the job lacks. notes: receives keys that have no effect."""
    try:
        allocation = read(job_id)
    except SlurmError as why:
        yield Problem("cluster.executor", "unreachable", f"cannot read the resources of Slurm job {job_id}: {why}")
        return
    wanted_requests = requests(recipe)
    node_lists = allocation.nodes_of([request.host.nodes for request in wanted_requests])
    shortfalls = [
        problem
        for request, nodes in zip(wanted_requests, node_lists, strict=True)
        for problem in _shortfalls(allocation, request, nodes)
    ]
    yield from shortfalls
    if shortfalls:
        has = f"Slurm job {job_id} has {_describe(allocation)}. Try a new allocation, `{salloc_command(recipe)}`, or"
        yield Problem("cluster.executor", "over-limit", f"{has} cluster.executor=slurm, which submits a new job")
        return
    notes.append(f"runs in Slurm job {job_id}, whose time limit applies in place of cluster.time_min")
    for name, component in hosts(components(recipe)).items():
        if ignored := [key for key in NODE_KEYS if getattr(component, key)]:
            notes.append(f"cluster.{name}.{', '.join(ignored)}: no effect, since the allocation already exists")


def _shortfalls(allocation: Allocation, request: ComponentRequest, nodes: list[AllocatedNode]) -> Iterator[Problem]:
    """Yield a problem for each resource that a component's nodes lack."""
    if len(nodes) < request.host.nodes:
        room = not allocation.het and len(allocation.parts[0]) >= request.host.nodes
        shared = "; cluster.share_nodes=true puts all components on the same nodes" if room else ""
        has = (
            f"got {request.host.nodes}; expected at most {len(nodes)}, which Slurm job {allocation.job_id} has for this"
            f" component{shared}"
        )
        yield Problem(f"{request.key}.nodes", "over-limit", has)
        return
    used = nodes[: request.host.nodes]
    for_ranks = f"CPUs for its {plural(ranks_per_node(request.host), 'rank')}"
    for name, unit, requested, has in (
        ("gpus_per_node", "GPUs", request.gpus, lambda node: node.gpus),
        ("cpus_per_task", for_ranks, request.cpus, lambda node: node.cpus),
        ("mem", "MB of memory", request.memory_mb, lambda node: node.memory_mb or request.memory_mb),
    ):
        fewest = min(used, key=has)
        if has(fewest) < requested:
            terms = f" ({request.keys(name)})" if len(request.together) > 1 and name != "mem" else ""
            message = f"got {requested:g} {unit} on each node{terms}; expected at most {has(fewest):g}, which the job has on"
            yield Problem(f"{request.key}.{name}", "over-limit", f"{message} {fewest.name}")


def _describe(allocation: Allocation) -> str:
    """Describe the nodes in the order of the components: `2 nodes with 8 CPUs and 8 GPUs each, then 1 node ...`."""
    kinds = Counter((k, node.cpus, node.gpus) for k, nodes in enumerate(allocation.parts) for node in nodes)
    parts = (
        f"{plural(number, 'node')} with {plural(cpus, 'CPU')} and {plural(count, 'GPU')}{' each' * (number > 1)}"
        for (_, cpus, count), number in kinds.items()
    )
    return ", then ".join(parts) or "no nodes"


def salloc_command(recipe: Recipe) -> str:
    """Return the salloc command for a recipe's resources."""
    options = (shlex.join(allocation_options(host)) for host in hosts(components(recipe)).values())
    return f"salloc --time={recipe.cluster.time_min} {' : '.join(options)}"
