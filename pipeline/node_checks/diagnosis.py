"""Find outlier nodes: each function takes reports or measurements and returns {node: [what is wrong with it]}.

Among nodes that differ, the majority is right. If a component has no majority, its nodes are compared with those of other
components, in what all nodes must share (`ONE_FOR_ALL`). If that gives no majority either, all are named and none is excluded
(`Undecided`). A measurement between two nodes counts against both.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipeline.builds import CUDA, MUST_MATCH, NCCL, TORCH, common_part
from pipeline.config import ClusterConfig, ComponentConfig, ranks_per_node
from pipeline.node_checks.network import Link, Pair, sort_out
from pipeline.node_checks.probe import NETWORK, GPUReport, NodeReport, RankReport
from pipeline.world import WorkerGroups

Problems = dict[str, list[str]]

FOREIGN_GB = 3.0
"""A GPU that is ours alone holds CUDA context and cuBLAS workspace of one process, or of two that share it: under 1 GB each."""
MEMORY_SHARE = 0.9
"""Of what a GPU is sold with, what CUDA shows at least: ECC and the driver keep a few percent of some."""
LEAST_FREE_GB = 0.016
"""Of a temporary folder. In /dev/shm NCCL takes about 10 MB for a connection, gloo and vLLM's queues more; in $TMPDIR compilers
keep their output. With less than 16 MiB nothing of that starts, and the error that comes then is a bus error without a word."""
ONE_FOR_ALL = ("driver", NCCL, NETWORK)
"""Versions that the nodes of all components have alike: the driver is the node's, whatever the image, and NCCL must be one."""


class Undecided(str):
    """A problem of one of several nodes that differ, without a majority that is right."""


def reports(
    nodes: Mapping[str, list[int]], seen: Mapping[int, RankReport], workers: WorkerGroups, cluster: ClusterConfig
) -> Problems:
    """Return what is wrong with GPUs and nodes, by the reports of ranks."""
    found: Problems = {}

    def blame(more: Mapping[str, list[str]]) -> None:
        for node, why in more.items():
            found.setdefault(node, []).extend(why)

    for component in ("train", "generate", "reward"):
        members = set(getattr(workers, component))
        config: ComponentConfig = getattr(cluster, component)
        on = {node: [seen[rank] for rank in ranks if rank in members and rank in seen] for node, ranks in nodes.items()}
        on = {node: there for node, there in on.items() if there}
        by_node = {node: report for node, there in on.items() if (report := _node_report(there))}
        others = {
            node: report
            for node, ranks in nodes.items()
            if node not in on and (report := _node_report(seen[r] for r in ranks if r in seen))
        }
        for name in sorted({name for report in by_node.values() for name in report.versions}):
            # NCCL need not tell its network, and a node that lacks any other of these is an outlier.
            tell = {node: report for node, report in by_node.items() if name in report.versions or name != NETWORK}
            values = {node: report.versions.get(name, "none") for node, report in tell.items()}
            elsewhere = [report.versions[name] for report in others.values() if name in report.versions and name in ONE_FOR_ALL]
            blame(outliers(values, f"{name} ({component})", elsewhere))
        kinds = {node: " and ".join(sorted({s.gpu.name for s in there if s.gpu and s.gpu.name})) for node, there in on.items()}
        blame(outliers({node: kind for node, kind in kinds.items() if kind}, f"its GPUs ({component})"))
        most_gb = max((s.gpu.memory_gb for there in on.values() for s in there if s.gpu), default=0.0)
        for node, there in on.items():
            blame({node: [*_space(there), *(_gpus(there, config, component, most_gb) if config.gpus_per_node else [])]})
    blame(_same_gpu(nodes, seen, workers, cluster))
    code = {node: report.code for node, ranks in nodes.items() if (report := _node_report(seen[r] for r in ranks if r in seen))}
    blame(outliers(code, "the code in pipeline/ and launch/, digest"))
    return {node: why for node, why in found.items() if why}


def _node_report(there: Iterable[RankReport]) -> NodeReport | None:
    """Return the first node report among these ranks, or None."""
    return next((report.node for report in there if report.node), None)


def _same_gpu(
    nodes: Mapping[str, list[int]], seen: Mapping[int, RankReport], workers: WorkerGroups, cluster: ClusterConfig
) -> Problems:
    """Return the nodes on which ranks use the same GPU that the recipe does not put there, and which ranks those are."""
    found: Problems = {}
    for node, ranks in nodes.items():
        users: dict[str, list[int]] = {}
        for report in (seen[rank] for rank in ranks if rank in seen):
            if report.gpu and report.gpu.uuid:
                users.setdefault(report.gpu.uuid, []).append(report.rank)
        for uuid, there in users.items():
            counts = Counter(map(workers.name, there))
            parts = [getattr(cluster, name) for name, count in counts.items() if count > 1]
            crowded = any(ranks_per_node(part) <= part.gpus_per_node for part in parts)
            if crowded or (len(counts) > 1 and not workers.colocated):
                told = " and ".join(f"rank {rank} ({workers.name(rank)})" for rank in there)
                found.setdefault(node, []).append(f"{told} use the same GPU {uuid}")
    return found


def outliers(values: Mapping[str, str], what: str, elsewhere: Sequence[str] = ()) -> Problems:
    """Return the nodes whose value is not the usual one. values: by node.

    elsewhere: the values of other nodes, which must be equal. They only count if `values` has no majority.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return {}
    for votes in (counts, counts + Counter(elsewhere)):
        usual, number = votes.most_common(1)[0]
        if usual in counts and number > votes.total() / 2:
            bad = {node: value for node, value in values.items() if value != usual}
            return {node: [f"{what}: {value}, but {usual} on {number} others"] for node, value in bad.items()}
    return {
        node: [Undecided(f"{what}: {value}, but {' or '.join(v for v, _ in counts.most_common() if v != value)} elsewhere")]
        for node, value in values.items()
    }


def images(seen: Mapping[int, RankReport], workers: WorkerGroups, cluster: ClusterConfig) -> tuple[dict[str, str], list[str]]:
    """Return ({what: why components cannot form one world}, other differences). Neither blames a node.

    Components that share GPUs communicate over gloo, so only torch's release counts there.
    """
    found: dict[str, dict[str, str]] = {}  # what -> component -> what most of its nodes have
    for component in ("train", "generate", "reward"):
        reports = [seen[rank].node for rank in getattr(workers, component) if rank in seen]
        there = [node.versions for node in reports if node]
        for name in (*MUST_MATCH, NETWORK):
            counts = Counter(versions[name] for versions in there if name in versions)
            usual, number = counts.most_common(1)[0] if counts else ("", 0)
            if 2 * number > counts.total() and (name == TORCH or not workers.colocated):
                found.setdefault(name, {})[component] = usual
    told = {TORCH: "torch's release", CUDA: "CUDA's major release"}
    parts = {name: {of: common_part(name, version) for of, version in found.get(name, {}).items()} for name in MUST_MATCH}
    parts[NETWORK] = found.get(NETWORK, {})
    apart = {name: _apart(told.get(name, name), values, cluster) for name, values in parts.items()}
    notes = [_apart(f"{name}'s build", found.get(name, {}), cluster) for name in (TORCH, CUDA)]
    return {name: why for name, why in apart.items() if why}, [why for why in notes if why]


def remedy(apart: Mapping[str, str], workers: WorkerGroups, cluster: ClusterConfig) -> tuple[str, str]:
    """Return (why components cannot form one world, what to try). apart: from `images`, not empty."""
    components = [name for name in ("train", "generate", "reward") if getattr(workers, name)]
    every = " and ".join(f"cluster.{name}" for name in components)
    if len({getattr(cluster, name).container_image for name in components}) > 1:
        how = "Try images that containers/build.sh made of one version, and the same NCCL_* variables in both (env_vars)"
        return "the components' images do not form one world", how
    if set(apart) == {NETWORK}:
        return "the components take different networks", f"Try env_vars: {{NCCL_NET: Socket}} in {every}"
    how = f"Try a python that has the same PyTorch, CUDA and NCCL in {every}"
    return "the components' installations do not form one world", how


def _apart(what: str, values: Mapping[str, str], cluster: ClusterConfig) -> str:
    """Return how components differ, with their images if those differ too; "" if they do not."""
    if len(set(values.values())) < 2:
        return ""
    images = {name: getattr(cluster, name).container_image for name in values}
    keys = {name: f"cluster.{name}" for name in values}
    if len(set(images.values())) > 1:
        keys = {name: f"{key}.container_image={images[name] or 'null'}" for name, key in keys.items()}
    return f"{what} is {', '.join(f'{value} in {keys[name]}' for name, value in values.items())}"


def _space(there: list[RankReport]) -> list[str]:
    return [
        f"{folder}: only {free * 1000:.0f} MB can be written; {LEAST_FREE_GB * 1000:.0f} MB at least"
        for report in there
        if report.node
        for folder, free in report.node.free_gb.items()
        if free < LEAST_FREE_GB
    ]


def _gpus(there: list[RankReport], component: ComponentConfig, name: str, most_gb: float) -> list[str]:
    """Return what is wrong with a component's GPUs on a node. most_gb: memory of the largest that it has on any node."""
    own = {report.rank: report.gpu for report in there if report.gpu}
    found = [f"rank {rank}: {gpu.problem}" for rank, gpu in own.items() if gpu.problem]
    visible = {uuid for gpu in own.values() for uuid in gpu.visible}
    if len(visible) < component.gpus_per_node:
        found.append(f"it shows {len(visible)} GPUs; cluster.{name}.gpus_per_node is {component.gpus_per_node}")
    for rank, gpu in own.items():
        found += _memory(rank, gpu, component, name, most_gb)
    for node in (report.node for report in there if report.node):
        found += [node.driver] if node.driver else []
        found += [
            f"GPU {uuid} has had {count} uncorrected memory errors since its driver was loaded"
            for uuid, count in node.errors.items()
            if count and uuid in visible
        ]
    return found


def _memory(rank: int, gpu: GPUReport, component: ComponentConfig, name: str, most_gb: float) -> list[str]:
    """Return what is wrong with a GPU's memory. cluster.<component>.gpu is only what the plan takes a GPU for."""
    asked, found = component.gpu_memory_gb, []
    if gpu.memory_gb and gpu.memory_gb < MEMORY_SHARE * (asked or most_gb):
        other = f"by cluster.{name}.gpu_memory_gb it would be {asked:g}" if asked else f"others of {name} have {most_gb:.1f}"
        found.append(f"rank {rank}: its GPU ({gpu.name}) has {gpu.memory_gb:.1f} GB; {other}")
    if gpu.used_gb > FOREIGN_GB:
        found.append(f"rank {rank}: {gpu.used_gb:.1f} GB of its GPU {gpu.uuid} are in use before anything is loaded")
    return found


def shared(nodes: Mapping[str, list[int]], seen: Mapping[int, RankReport], unread: Mapping[int, str]) -> Problems:
    """Return the nodes that do not share the run folder with rank 0, or rank 0's node if most do not.

    unread: by rank, why rank 0 could not read its marker.
    """
    apart: Problems = {}
    for node, ranks in nodes.items():
        reports = [seen[rank].node for rank in ranks if rank in seen]
        why = [report.shared for report in reports if report and report.shared]
        why += [f"rank 0 cannot see what it wrote: {unread[rank]}" for rank in ranks if rank in unread]
        if why:
            apart[node] = [f"the run folder is not the others': {line}" for line in why]
    if not apart or (len(nodes) > 2 and len(apart) <= len(nodes) / 2):
        return apart
    home = next(node for node, ranks in nodes.items() if 0 in ranks)
    if len(nodes) == 2:
        return {home: [f"it does not share the run folder with {next(iter(apart))}"], **apart}
    why = f"it does not share the run folder with {len(apart)} of {len(nodes)} nodes; {next(iter(apart))} says: "
    return {node: [why + next(iter(apart.values()))[0]] for node in nodes if node not in apart}


def links(names: Mapping[int, str], measured: Mapping[Pair, Link], least: float | None) -> Problems:
    """Return the nodes with only slow links, and both ends of a slow link between nodes that have fast ones."""
    slow, cleared = sort_out(dict(measured), least)
    dead: Problems = {}
    tardy: Problems = {}
    for (one, other), link in measured.items():
        for rank, peer in ((one, other), (other, one)):
            if not (rank in slow or {rank, peer} <= set(cleared)):
                continue
            if link.problem:
                dead.setdefault(names[rank], []).append(f"{names[peer]} ({link.problem})")
            elif least is not None and link.gb_per_s < least:
                tardy.setdefault(names[rank], []).append(f"{link.gb_per_s:.3g} GB/s to {names[peer]}")
    found = {node: [f"no network to {' and '.join(ways)}"] for node, ways in dead.items()}
    for node, ways in tardy.items():
        found.setdefault(node, []).append(f"a slow network, {', '.join(ways)}; cluster.node_checks.min_gb_per_s is {least:g}")
    return found


def clocks(names: Mapping[int, str], measured: Mapping[Pair, Link], most: float) -> Problems:
    """Return the nodes whose clock differs from the median by more than `most` seconds plus the error of the measurement."""
    skews = against_first(measured)
    middle = statistics.median(skew for skew, _ in skews.values()) if len(skews) > 2 else 0.0
    off = {rank: skew - middle for rank, (skew, error) in skews.items() if abs(skew - middle) - error > most}
    if len(skews) == 2 and off:
        off = {0: -sum(off.values()), **off}
    than = "the others'" if len(skews) > 2 else "the other's"
    bound = f"cluster.node_checks.max_clock_skew_s is {most:g}"
    return {
        names[rank]: [f"its clock is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} {than}; {bound}"]
        for rank, skew in off.items()
    }


def against_first(measured: Mapping[Pair, Link]) -> dict[int, tuple[float, float]]:
    """Return by rank (seconds that its clock is ahead of rank 0's, error), summed along the shortest path of links.

    So no rank has to compare its clock with all others. The error over 500 nodes is that of 500 half round trips, some 50 ms.
    """
    beside: dict[int, list[tuple[int, float, float]]] = {}
    for (opener, other), link in measured.items():
        if link.error_s:
            beside.setdefault(opener, []).append((other, link.ahead_s, link.error_s))
            beside.setdefault(other, []).append((opener, -link.ahead_s, link.error_s))
    reached = {0: (0.0, 0.0)} if 0 in beside else {}
    queue = list(reached)
    for rank in queue:
        for peer, ahead, error in beside[rank]:
            if peer not in reached:
                reached[peer] = (reached[rank][0] + ahead, reached[rank][1] + error)
                queue.append(peer)
    return reached
