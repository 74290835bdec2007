"""Whether the nodes of a partition are what a component asks for, and whether there are enough for all components together.

Nodes that are down or drained count: they may be back when the job's turn comes; a note says how many there are now. Of a
constraint with counts or brackets (`[rack1*2&rack2*4]`) only the names are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import combinations

from launch.preflight.slurm_cluster import Fields, Node, SlurmCluster
from launch.preflight.slurm_request import Request


@dataclass(frozen=True)
class _Amount:
    """Something that a node has so much of."""

    key: str
    wanted: float
    what: str
    of: Callable[[Node], float]
    would_do: Callable[[float], str]  # the value of `key` for what nodes have


def problems(cluster: SlurmCluster, partition: Fields, request: Request) -> Iterator[str]:
    """That the nodes of one partition do not do for one component."""
    name, key = partition["PartitionName"], request.key
    members = [node for node in cluster.nodes if name in node.partitions]
    if not members:
        yield f"{key}.partition: {name} has no nodes"
        return
    if request.nodes > len(members):
        yield f"{key}.nodes: {request.nodes}, but partition {name} has {len(members)} nodes; at most {len(members)}"
    count = min(request.nodes, len(members))  # that there are too few has been said
    alone = True
    for amount in _amounts(partition, request):
        have = sorted((amount.of(node) for node in members), reverse=True)
        if have[count - 1] < amount.wanted:
            alone = False
            enough = sum(value >= amount.wanted for value in have)
            yield (
                f"{amount.key}: that is {amount.wanted:g} {amount.what} on each of {request.nodes} nodes, but {enough} of the"
                f" {len(members)} nodes of partition {name} have so much; at most {amount.would_do(have[count - 1])}"
            )
    for problem in _features(members, name, request, count):
        alone = False
        yield problem
    if alone and len(fitting(cluster, partition, request)) < count:
        yield (
            f"{key}.nodes: {request.nodes}, but {len(fitting(cluster, partition, request))} of the {len(members)} nodes of"
            f" partition {name} have all that is asked for ({_asked(partition, request)}); fewer nodes, or less of one of these"
        )


def fitting(cluster: SlurmCluster, partition: Fields, request: Request) -> list[Node]:
    """The nodes of a partition that have all that a component asks of each."""
    amounts = _amounts(partition, request)
    return [
        node
        for node in cluster.nodes
        if partition["PartitionName"] in node.partitions
        and all(amount.of(node) >= amount.wanted for amount in amounts)
        and satisfies(request.constraint, node.features)
    ]


def counted(request: Request, nodes: list[Node]) -> Request:
    """Return what limits count, at least: of whole nodes all CPUs and GPUs, and all memory where all is asked for.

    nodes: those that would do.
    """
    if request.all_memory:
        request = replace(request, memory_mb=min(node.memory_mb for node in nodes))
    if request.whole:
        request = replace(request, cpus=min(node.cpus for node in nodes), gpus=min(node.gpus for node in nodes))
    return request


def problems_together(sets: dict[str, tuple[int, set[str]]]) -> Iterator[str]:
    """`sets`: component's key -> (nodes that it asks for, names of those that would do). Two components never share a node.

    Slurm takes such a job, and it waits for ever. By Hall's theorem there is a choice of nodes if and only if any number of
    components find as many nodes as they ask for among those that would do for one of them.
    """
    for size in range(2, len(sets) + 1):
        for keys in combinations(sets, size):
            wanted, there = sum(sets[key][0] for key in keys), len(set.union(*(sets[key][1] for key in keys)))
            if wanted > there:
                terms = " + ".join(str(sets[key][0]) for key in keys)
                yield (
                    f"{', '.join(f'{key}.nodes' for key in keys)}: {terms} nodes, but there are {there} that would do, and two"
                    f" components share one only with cluster.share_nodes=true; without it together at most {there}"
                )
                return


def _amounts(partition: Fields, request: Request) -> list[_Amount]:
    most_cpus, most_memory = (_limit(partition.get(name)) for name in ("MaxCPUsPerNode", "MaxMemPerNode"))
    return [
        _Amount(
            request.keys("cpus_per_task"),
            request.cpus,
            "CPUs",
            lambda node: min(node.cpus, most_cpus),
            lambda have: (
                str(int(have) // request.ranks_per_node)
                if have >= request.ranks_per_node
                else f"1, with {request.key}.ranks_per_node={have:g}"
            ),
        ),
        _Amount(request.keys("gpus_per_node"), request.gpus, "GPUs", lambda node: node.gpus, lambda have: f"{have:g}"),
        _Amount(
            f"{request.key}.mem",
            request.memory_mb,
            "MB of memory",
            lambda node: min(node.memory_mb, most_memory),
            lambda have: f"{int(have)}M",
        ),
    ]


def _limit(text: str | None) -> float:
    return float(text) if text and text.isdigit() and text != "0" else float("inf")


def _asked(partition: Fields, request: Request) -> str:
    asked = [f"{amount.wanted:g} {amount.what}" for amount in _amounts(partition, request) if amount.wanted]
    return ", ".join([*asked, *([f"the features {request.constraint}"] if request.constraint else [])])


def _features(members: list[Node], partition: str, request: Request, count: int) -> Iterator[str]:
    if not request.constraint:
        return
    key, there = f"{request.key}.constraint", sorted(set.union(*(set(node.features) for node in members)))
    if unknown := [name for name in feature_names(request.constraint) if name not in there]:
        near = get_close_matches(unknown[0], there, 1)
        has = f"did you mean '{near[0]}'?" if near else f"they have: {', '.join(there) or 'none at all'}"
        if "|" not in request.constraint:
            yield f"{key}: no node of partition {partition} has the feature '{unknown[0]}'; {has}"
            return
    enough = sum(satisfies(request.constraint, node.features) for node in members)
    if enough < count:
        yield (
            f"{key}: {enough} of the {len(members)} nodes of partition {partition} have {request.constraint}, not"
            f" {request.nodes}; their features: {', '.join(there) or 'none'}"
        )


def feature_names(constraint: str) -> list[str]:
    return [re.sub(r"\*\d+$", "", word) for word in re.findall(r"[^&|,()\[\]\s]+", constraint)]


def satisfies(constraint: str | None, features: frozenset[str]) -> bool:
    """Whether a node may be one of those. `&` and `|` from left to right, as Slurm has them; sbatch(1), --constraint."""
    if not constraint:
        return True
    if set("*[") & set(constraint):  # of the whole allocation, not of each node
        return any(name in features for name in feature_names(constraint))
    words = re.findall(r"[&|,()]|[^&|,()\s]+", constraint)

    def expression() -> bool:
        value = term()
        while words and words[0] != ")":
            operator = words.pop(0)
            other = term()
            value = value or other if operator == "|" else value and other
        return value

    def term() -> bool:
        word = words.pop(0) if words else ""
        if word != "(":
            return word in features
        value = expression()
        if words:
            words.pop(0)
        return value

    return expression()
