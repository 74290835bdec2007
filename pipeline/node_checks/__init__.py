"""Check every node before anything is loaded, and name those that do not match the recipe or the other nodes.

    check(world, cluster, compiles)          # every rank, between `join` and its role

Every rank probes its own GPU, and the first rank of a component on a node probes that node (`probe.py`). The first rank of each
node exchanges messages with its neighbours in the ring of nodes (`ring.py`), without nodes that have environment ranks alone.
Rank 0 gathers the reports, finds outliers (`diagnosis.py`), and writes them to the attempt's nodes.json and to its log
(`results.py`).

The cost: each rank sends one message to rank 0's store; each node writes one small file, and rank 0 reads several at a
time; all nodes exchange messages at the same time, two or three times for about 0.1 s. A single node sends nothing and writes
no file.

Not checked: the network cards of all GPUs except a node's first GPU, disks, and failures after the start.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from pipeline.config import ClusterConfig, ComponentConfig
from pipeline.files import small_files
from pipeline.job.attempt import Attempt
from pipeline.job.watchdog import Failure, Heartbeat
from pipeline.job.world import World
from pipeline.node_checks import diagnosis, probe, ring
from pipeline.node_checks.probe import InstallationNeeds, RankReport
from pipeline.node_checks.results import CheckResults, record, text
from pipeline.node_checks.ring import Link, Rounds

logger = logging.getLogger(__name__)

VERB = "check nodes"
PROBE_TIMEOUT_S = 120.0
"""Seconds until all ranks have probed: CUDA starts on a busy node, and a busy file server serves the code."""
CHUNK = 256  # keys that one request to the store reads


class BadNodes(RuntimeError):
    """Raised when nodes failed their checks. The attempt's failure.json and bad_nodes name them already."""


def check(world: World, cluster: ClusterConfig, compiles: bool = False) -> None:
    """Check the nodes; every rank calls this. compiles: this rank's component cannot run on GPUs without Triton.

    Raises BadNodes on rank 0, TimeoutError elsewhere if rank 0 does not respond.
    """
    if not cluster.node_checks.enabled:
        return
    component: ComponentConfig = getattr(cluster, world.component)
    needs = InstallationNeeds(world.component in ("train", "reward"), compiles and component.gpus_per_node > 0)
    with world.phase("", verb=VERB):
        if world.rank == 0:
            _lead(world, cluster, needs)
        else:
            _follow(world, cluster, needs)


def _probe(world: World, cluster: ClusterConfig, token: str, needs: InstallationNeeds) -> RankReport:
    with world.phase("probe the node"):
        return probe.probe_rank(world.info, world.device, getattr(cluster, world.component), token, needs)


# ---- every other rank -------------------------------------------------------------------------------------------------------


def _follow(world: World, cluster: ClusterConfig, needs: InstallationNeeds) -> None:
    """Probe this rank and report. The outcome is not sent back: this rank loads nothing until rank 0 calls a verb."""
    token = _wait(world, "token", PROBE_TIMEOUT_S, str)
    report = _probe(world, cluster, token, needs)
    _publish(world, f"report/{world.rank}", report)
    if report.node is None or not token:
        return
    for turn in range(ring.TURNS):
        rounds = _wait(world, f"rounds/{turn}", PROBE_TIMEOUT_S + probe.SHARED_S + ring.bound_s(ring.MOST_ROUNDS), Rounds)
        probe.remove_marker(world.info, token)  # rank 0 has read it
        if links := ring.exchange(world, turn, rounds):
            _publish(world, f"links/{turn}/{world.rank}", links)


def _publish(world: World, key: str, value: Any) -> None:
    world.store.set(f"nodes/{key}", msgspec.msgpack.encode(value))


def _wait(world: World, key: str, timeout_s: float, kind: Any) -> Any:
    """Wait for rank 0 to set a key, and return its value."""
    try:
        world.store.wait([f"nodes/{key}"], timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise TimeoutError(f"{world.describe(0)} has not continued the node checks within {timeout_s:g} s") from error
    return msgspec.msgpack.decode(world.store.get(f"nodes/{key}"), type=kind)


# ---- rank 0 -----------------------------------------------------------------------------------------------------------------


def _lead(world: World, cluster: ClusterConfig, needs: InstallationNeeds) -> None:
    start = time.perf_counter()
    results = CheckResults(_nodes(world))
    token = secrets.token_hex(16) if len(results.ranks) > 1 else ""
    if token:
        probe.write_marker(world.info, token)
    _publish(world, "token", token)
    results.reports[0] = _probe(world, cluster, token, needs)
    with world.phase("wait for other ranks' reports"):
        replies = _gather(world, "nodes/report", range(1, world.size), PROBE_TIMEOUT_S)
        results.reports |= {rank: msgspec.msgpack.decode(report, type=RankReport) for rank, report in replies.items()}
    results.add_problems(_silent(world, results.ranks, set(range(world.size)) - set(results.reports), PROBE_TIMEOUT_S))
    results.add_problems(diagnosis.reports(results.ranks, results.reports, world.workers, cluster))
    results.mismatches, results.notes = diagnosis.images(results.reports, world.workers, cluster)
    results.notes += dict.fromkeys(diagnosis.notes(results.ranks, results.reports, world.workers))
    lacks, of_some_nodes = diagnosis.lacks(results.ranks, results.reports, world.workers)
    results.mismatches |= lacks
    results.add_problems(of_some_nodes)
    if token:
        with world.phase("read other nodes' markers"):
            unread = probe.unreadable_markers(world.info, results.reports, token)
        results.add_problems(diagnosis.run_folders(results.ranks, results.reports, unread))
        _measure(world, results, cluster.node_checks.min_gb_per_s)
        probe.remove_marker(world.info, token)
        results.add_problems(diagnosis.links(results.names, results.links, cluster.node_checks.min_gb_per_s))
        results.add_problems(diagnosis.clocks(results.names, results.links))
    content = record(results, time.perf_counter() - start)
    small_files.write(world.info.folder / "nodes.json", content)
    logger.info(text(content))
    if results.mismatches:
        _fail_mismatch(world, results, cluster)
    if results.problems:
        _fail(world, results)


def _nodes(world: World) -> dict[str, list[int]]:
    """Return node -> its ranks."""
    found: dict[str, list[int]] = {}
    for rank, node in _gather(world, "here", range(world.size), PROBE_TIMEOUT_S).items():
        found.setdefault(node.decode(), []).append(rank)
    return found


def _measure(world: World, results: CheckResults, least: float | None) -> None:
    """Measure the ring of the reachable nodes. Then measure nodes that may be slow once more, with other partners."""
    apart = set(world.workers.environment)  # ranks that are in no process group
    members = [ranks[0] for ranks in results.ranks.values() if set(ranks) <= set(results.reports) and ranks[0] not in apart]
    rounds = ring.ring([] if results.mismatches else members)  # messages between mismatched components never arrive
    for turn in range(ring.TURNS):
        _publish(world, f"rounds/{turn}", rounds)
        links, bound = ring.exchange(world, turn, rounds), ring.bound_s(len(rounds))
        openers = sorted({opener for pairs in rounds for opener, _ in pairs} - {0})
        with world.phase("wait for other nodes' measurements"):
            replies = _gather(world, f"nodes/links/{turn}", openers, bound)
        results.add_problems(_silent(world, results.ranks, set(openers) - set(replies), bound))
        for reply in replies.values():
            links += msgspec.msgpack.decode(reply, type=list[Link])
        for link in links:
            pair = (link.opener, link.other)
            results.links[pair] = ring.better(link, results.links.get(pair))
        rounds = ring.remeasure_pairs(results.links, least)


def _gather(world: World, prefix: str, ranks: Sequence[int], timeout_s: float) -> dict[int, bytes]:
    """Return rank -> the value that it set at `prefix/RANK` within `timeout_s`, in the order of ranks, without late ranks."""
    keys = [f"{prefix}/{rank}" for rank in ranks]
    with contextlib.suppress(dist.DistStoreError):  # some ranks are late: return the others' values
        world.store.wait(keys, timedelta(seconds=timeout_s))
    found: dict[int, bytes] = {}
    for first in range(0, len(keys), CHUNK):
        values = world.store.exchange("nodes/gathering", b"", keys[first : first + CHUNK])
        found |= {rank: value for rank, value in zip(ranks[first : first + CHUNK], values, strict=True) if value is not None}
    return found


def _silent(world: World, nodes: dict[str, list[int]], absent: set[int], timeout_s: float) -> dict[str, list[str]]:
    """Return node -> problems, for the nodes of ranks that have not reported; problems have the ranks' last activities."""
    found: dict[str, list[str]] = {}
    for node, ranks in nodes.items():
        for rank in sorted(absent & set(ranks)):
            beat = msgspec.msgpack.decode(world.store.get(f"beat/{rank}"), type=Heartbeat)
            where = f"it is in verb '{beat.verb}', phase '{beat.phase}'"
            found.setdefault(node, []).append(f"{world.describe(rank)} has not answered within {timeout_s:g} s; {where}")
    return found


def _fail_mismatch(world: World, results: CheckResults, cluster: ClusterConfig) -> None:
    """Report that components differ, or lack a needed part on all of their nodes. No node is at fault, and none is excluded."""
    headline, advice = diagnosis.remedy(results.mismatches, world.workers, cluster)
    others = "".join(f"; {node}: {'; '.join(why)}" for node, why in results.problems.items())
    message = f"{headline}: {'; '.join(results.mismatches.values())}. {advice}{others}"
    Failure(world.rank, world.component, world.info.node, VERB, "", message).record(world.info.folder)
    raise BadNodes(headline)


def _fail(world: World, results: CheckResults) -> None:
    """Report the bad nodes, and record those that are certainly bad, so that a requeue excludes them. Raises BadNodes.

    If all nodes are bad and there are more than two, none is recorded.
    """
    bad = {node: "; ".join(results.problems[node]) for node in results.ranks if node in results.problems}
    total = len(results.ranks)
    headline, advice = f"{len(bad)} of {total} nodes failed the checks" if total > 1 else "the node failed its checks", ""
    undecided = {node for node, why in results.problems.items() if all(isinstance(line, diagnosis.Undecided) for line in why)}
    certain = {node: why for node, why in bad.items() if node not in undecided}
    if not certain:
        headline += "; nodes differ without a majority, so no node is excluded and the run stops"
        advice = ". Try without the faulty node: sbatch --exclude=NODE ... launch/hetstep.sbatch"
    elif len(bad) == total > 2:
        headline += ", so the cause is the recipe or something that all nodes share"
    else:
        Attempt(world.info.folder).record_bad_nodes(certain)
    message = f"{headline}: {'; '.join(f'{node}: {why}' for node, why in bad.items())}{advice}"
    first = next(iter(bad))
    rank = results.ranks[first][0]
    Failure(rank, world.workers.name(rank), first, VERB, "", message).record(world.info.folder)
    raise BadNodes(headline)
