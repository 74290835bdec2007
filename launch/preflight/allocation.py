"""Whether the Slurm allocation that this process is in has room for a recipe: nodes, and on each of them GPUs, CPUs and memory.

Asks `scontrol show job -d`, which says of each node what the job has there. What a partition, account, QOS or constraint of the
recipe asks for is not compared: the allocation has what it has.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from launch.components import components
from launch.nodes import PLACES, allocation_options, hosts
from launch.preflight.slurm_cluster import Unanswered, ask
from launch.preflight.slurm_request import Request, requests
from launch.units import plural
from pipeline.config import Recipe

# `Nodes=n[1-2] CPU_IDs=0-7,16 Mem=1024 GRES=gpu:h100:8(IDX:0-7)`; Mem is 0 where Slurm does not hand out memory.
ON_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)")
GPUS = re.compile(r"\bgpu(?::[^:(,]+)?:(\d+)")


@dataclass(frozen=True)
class Node:
    """What a job has on one node."""

    name: str
    cpus: int
    memory_mb: int  # 0: all that it can get
    gpus: int


@dataclass(frozen=True)
class Allocation:
    job_id: str
    parts: list[list[Node]]  # of a heterogeneous job one for each component, else one
    het: bool

    def nodes_of(self, asked: list[int]) -> list[list[Node]]:
        """The nodes for components of so many nodes: in a plain allocation one after the other. There may be fewer."""
        if self.het:
            return [self.parts[k] if k < len(self.parts) else [] for k in range(len(asked))]
        first, given = 0, []
        for nodes in asked:
            given.append(self.parts[0][first : first + nodes])
            first += nodes
        return given


def read(job_id: str) -> Allocation:
    """Raises Unanswered."""
    lines = [line for line in ask("scontrol", "show", "job", "-d", "-o", job_id).splitlines() if line.startswith("JobId=")]
    parts = {}
    for line in lines:
        offset = re.search(r" HetJobOffset=(\d+)", line)
        parts[int(offset[1]) if offset else 0] = list(_nodes(line))
    return Allocation(job_id, [parts[k] for k in sorted(parts)], het=len(parts) > 1)


def _nodes(line: str) -> Iterator[Node]:
    for names, cpus, memory, gres in ON_NODES.findall(line):
        gpus = sum(map(int, GPUS.findall(gres)))
        for name in ask("scontrol", "show", "hostnames", names).split():
            yield Node(name, _length(cpus), int(memory), gpus)


def _length(ids: str) -> int:
    """`0-7,16` -> 9."""
    ends = [part.partition("-") for part in ids.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def problems(recipe: Recipe, job_id: str, notes: list[str]) -> Iterator[str]:
    """notes: what is done otherwise than the recipe says is appended to it."""
    try:
        allocation = read(job_id)
    except Unanswered as why:
        yield f"cluster.executor: what Slurm job {job_id} has cannot be seen: {why}"
        return
    asked = requests(recipe)
    given = allocation.nodes_of([request.nodes for request in asked])
    found = [problem for request, nodes in zip(asked, given, strict=True) for problem in _against(allocation, request, nodes)]
    yield from found
    if found:
        yield (
            f"cluster.executor: Slurm job {job_id} has {_has(allocation)}; an allocation that would do: `{command(recipe)}`; or"
            " cluster.executor=slurm, which submits a job of its own"
        )
        return
    notes.append(f"runs in Slurm job {job_id}, within its time limit and not cluster.time_min")
    for name, component in hosts(components(recipe)).items():
        if said := [key for key in PLACES if getattr(component, key)]:
            notes.append(f"cluster.{name}.{', '.join(said)}: the allocation's own count")


def _against(allocation: Allocation, request: Request, nodes: list[Node]) -> Iterator[str]:
    """Why a component cannot run on its nodes."""
    if len(nodes) < request.nodes:
        room = not allocation.het and len(allocation.parts[0]) >= request.nodes
        shared = "; cluster.share_nodes=true puts all components on the same nodes" if room else ""
        yield f"{request.key}.nodes: {request.nodes}, but Slurm job {allocation.job_id} has {len(nodes)} for it{shared}"
        return
    used = nodes[: request.nodes]
    for_ranks = f"CPUs for its {plural(request.ranks_per_node, 'rank')}"
    for keys, what, needed, has in (
        (request.keys("gpus_per_node"), "GPUs", request.gpus, lambda node: node.gpus),
        (request.keys("cpus_per_task"), for_ranks, request.cpus, lambda node: node.cpus),
        (f"{request.key}.mem", "MB", request.memory_mb, lambda node: node.memory_mb or request.memory_mb),
    ):
        fewest = min(used, key=has)
        if has(fewest) < needed:
            yield f"{keys}: {needed:g} {what} are needed on each node, and the job has {has(fewest):g} on {fewest.name}"


def _has(allocation: Allocation) -> str:
    """`2 nodes with 8 CPUs and 8 GPUs each, and 1 node ...`, in the order of the components."""
    kinds: list[tuple[int, int, int]] = []
    for k, nodes in enumerate(allocation.parts):
        for node in nodes:
            kind = (k, node.cpus, node.gpus)
            if kind not in kinds:
                kinds.append(kind)
    told = []
    for k, cpus, gpus in kinds:
        number = sum((node.cpus, node.gpus) == (cpus, gpus) for node in allocation.parts[k])
        told.append(f"{plural(number, 'node')} with {plural(cpus, 'CPU')} and {plural(gpus, 'GPU')}{' each' * (number > 1)}")
    return ", then ".join(told) or "no nodes"


def command(recipe: Recipe) -> str:
    """The salloc that gets what a recipe asks for."""
    asked = (shlex.join(allocation_options(host)) for host in hosts(components(recipe)).values())
    return f"salloc --time={recipe.cluster.time_min} {' : '.join(asked)}"
