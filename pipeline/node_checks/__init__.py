"""Check every node before anything is loaded, and name those that do not match the recipe or the other nodes.

    check(world, cluster)          # every rank, between `join` and its role

Every rank probes its own GPU, and the first rank of a component on a node probes that node (`probe.py`). The first rank of each
node exchanges messages with its neighbours in the ring of nodes (`network.py`). Rank 0 gathers the reports, finds outliers
(`diagnosis.py`), and writes them to the attempt's nodes.json and to its log (`findings.py`).

The cost: a message of each rank to rank 0's store; a small file of each node, which rank 0 reads several at a time; two or
three exchanges of about 0.1 s, on all nodes at the same time. A single node sends nothing and writes no file.

Left out: the network card of all GPUs but a node's first, disks, and what breaks later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from pipeline.attempt import Attempt
from pipeline.config import ClusterConfig
from pipeline.node_checks import diagnosis, network, probe
from pipeline.node_checks import findings as results
from pipeline.node_checks.findings import Findings
from pipeline.node_checks.network import Link, Rounds
from pipeline.node_checks.probe import RankReport
from pipeline.storage import write_durably
from pipeline.watchdog import Failure, Heartbeat
from pipeline.world import World

logger = logging.getLogger(__name__)

VERB = "check nodes"
PROBE_TIMEOUT_S = 120.0
"""For all ranks to probe: CUDA starts on a busy node, and a busy file server serves the code."""
CHUNK = 256  # keys that the store is asked for at once


class BadNodes(RuntimeError):
    """Nodes failed their checks. failure.json and bad_nodes of the attempt name them already."""


def check(world: World, cluster: ClusterConfig) -> None:
    """Every rank calls this. Raises BadNodes on rank 0, and TimeoutError elsewhere if rank 0 does not go on."""
    if not cluster.node_checks.enabled:
        return
    with world.phase("", verb=VERB):
        if world.rank == 0:
            _lead(world, cluster)
        else:
            _follow(world, cluster)


def _probe_rank(world: World, cluster: ClusterConfig, token: str) -> RankReport:
    with world.phase("probe the node"):
        return probe.probe_rank(world.info, world.device, getattr(cluster, world.component), token)


# ---- every other rank -------------------------------------------------------------------------------------------------------


def _follow(world: World, cluster: ClusterConfig) -> None:
    """Probe this rank and report. It need not know the outcome: it loads nothing until rank 0 calls a verb."""
    token = _wait(world, "token", PROBE_TIMEOUT_S, str)
    report = _probe_rank(world, cluster, token)
    _send(world, f"report/{world.rank}", report)
    if report.node is None or not token:
        return
    for turn in range(network.TURNS):
        rounds = _wait(world, f"rounds/{turn}", PROBE_TIMEOUT_S + probe.SHARED_S + network.bound_s(network.MOST_ROUNDS), Rounds)
        probe.remove_marker(world.info, token)  # rank 0 has read it
        if links := network.exchange(world, turn, rounds):
            _send(world, f"links/{turn}/{world.rank}", links)


def _send(world: World, key: str, value: Any) -> None:
    world.store.set(f"nodes/{key}", msgspec.msgpack.encode(value))


def _wait(world: World, key: str, timeout_s: float, kind: Any) -> Any:
    """Return the value that rank 0 sets at a key."""
    try:
        world.store.wait([f"nodes/{key}"], timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise TimeoutError(f"rank 0 (train) has not continued the node checks within {timeout_s:g} s") from error
    return msgspec.msgpack.decode(world.store.get(f"nodes/{key}"), type=kind)


# ---- rank 0 -----------------------------------------------------------------------------------------------------------------


def _lead(world: World, cluster: ClusterConfig) -> None:
    start = time.perf_counter()
    findings = Findings(_nodes(world))
    token = secrets.token_hex(16) if len(findings.ranks) > 1 else ""
    if token:
        probe.write_marker(world.info, token)
    _send(world, "token", token)
    findings.reports[0] = _probe_rank(world, cluster, token)
    with world.phase("wait for the reports of other ranks"):
        reports = _gather(world, "nodes/report", range(1, world.size), PROBE_TIMEOUT_S)
        findings.reports |= {rank: msgspec.msgpack.decode(report, type=RankReport) for rank, report in reports.items()}
    findings.blame(_silent(world, findings.ranks, set(range(world.size)) - set(findings.reports), PROBE_TIMEOUT_S))
    findings.blame(diagnosis.reports(findings.ranks, findings.reports, world.workers, cluster))
    findings.apart, findings.notes = diagnosis.images(findings.reports, world.workers, cluster)
    if token:
        with world.phase("read the markers of other nodes"):
            unread = probe.unreadable_markers(world.info, findings.reports, token)
        findings.blame(diagnosis.shared(findings.ranks, findings.reports, unread))
        _measure(world, findings, cluster.node_checks.min_gb_per_s)
        probe.remove_marker(world.info, token)
        findings.blame(diagnosis.links(findings.names, findings.links, cluster.node_checks.min_gb_per_s))
        findings.blame(diagnosis.clocks(findings.names, findings.links, cluster.node_checks.max_clock_skew_s))
    record = results.record(findings, time.perf_counter() - start)
    write_durably(world.info.folder / "nodes.json", json.dumps(record, indent=1) + "\n")
    logger.info(results.text(record))
    if findings.apart:
        _fail_apart(world, findings, cluster)
    if findings.problems:
        _fail(world, findings)


def _nodes(world: World) -> dict[str, list[int]]:
    """Return the ranks of each node."""
    found: dict[str, list[int]] = {}
    for rank, node in _gather(world, "here", range(world.size), PROBE_TIMEOUT_S).items():
        found.setdefault(node.decode(), []).append(rank)
    return found


def _measure(world: World, findings: Findings, least: float | None) -> None:
    """Measure the ring of the reachable nodes, and then once more, with other neighbours, those that may be slow."""
    members = [ranks[0] for ranks in findings.ranks.values() if set(ranks) <= set(findings.reports)]
    rounds = network.ring([] if findings.apart else members)  # a message between such components would never arrive
    for turn in range(network.TURNS):
        _send(world, f"rounds/{turn}", rounds)
        links, bound = network.exchange(world, turn, rounds), network.bound_s(len(rounds))
        openers = sorted({opener for pairs in rounds for opener, _ in pairs} - {0})
        with world.phase("wait for what other nodes measure"):
            reports = _gather(world, f"nodes/links/{turn}", openers, bound)
        findings.blame(_silent(world, findings.ranks, set(openers) - set(reports), bound))
        for encoded in reports.values():
            links += msgspec.msgpack.decode(encoded, type=list[Link])
        for link in links:
            pair = (link.opener, link.other)
            findings.links[pair] = network.better(link, findings.links.get(pair))
        rounds = network.again(findings.links, least)


def _gather(world: World, prefix: str, ranks: Sequence[int], timeout_s: float) -> dict[int, bytes]:
    """Return what ranks have set at `prefix/RANK` within the time, in the order of ranks."""
    keys = [f"{prefix}/{rank}" for rank in ranks]
    with contextlib.suppress(dist.DistStoreError):  # some are late: what there is counts
        world.store.wait(keys, timedelta(seconds=timeout_s))
    found: dict[int, bytes] = {}
    for first in range(0, len(keys), CHUNK):
        values = world.store.exchange("nodes/gathering", b"", keys[first : first + CHUNK])
        found |= {rank: value for rank, value in zip(ranks[first : first + CHUNK], values, strict=True) if value is not None}
    return found


def _silent(world: World, nodes: dict[str, list[int]], absent: set[int], timeout_s: float) -> dict[str, list[str]]:
    """Return the nodes of ranks that have not reported, with the activity in their heartbeats."""
    found: dict[str, list[str]] = {}
    for node, ranks in nodes.items():
        for rank in sorted(absent & set(ranks)):
            beat = msgspec.msgpack.decode(world.store.get(f"beat/{rank}"), type=Heartbeat)
            where = f"it is in verb '{beat.verb}', phase '{beat.phase}'"
            found.setdefault(node, []).append(f"{world.describe(rank)} has not answered within {timeout_s:g} s; {where}")
    return found


def _fail_apart(world: World, findings: Findings, cluster: ClusterConfig) -> None:
    """Report that components differ. No node is to blame, and none is excluded."""
    headline, how = diagnosis.remedy(findings.apart, world.workers, cluster)
    others = "".join(f"; {node}: {'; '.join(why)}" for node, why in findings.problems.items())
    message = f"{headline}: {'; '.join(findings.apart.values())}. {how}{others}"
    Failure(world.rank, world.component, world.info.node, VERB, "", message).record(world.info.folder)
    raise BadNodes(headline)


def _fail(world: World, findings: Findings) -> None:
    """Report the bad nodes, and record those that are certainly bad, so that a requeue excludes them.

    If all of more than two nodes are bad, none is recorded. Raises BadNodes.
    """
    bad = {node: "; ".join(findings.problems[node]) for node in findings.ranks if node in findings.problems}
    total = len(findings.ranks)
    headline, how = f"{len(bad)} of {total} nodes failed the checks" if total > 1 else "the node failed its checks", ""
    undecided = {node for node, why in findings.problems.items() if all(isinstance(line, diagnosis.Undecided) for line in why)}
    surely = {node: why for node, why in bad.items() if node not in undecided}
    if not surely:
        headline += ", which differ: nobody can tell which is right, so none is left out and the run stops"
        how = ". Try without the wrong one: sbatch --exclude=NODE ... launch/hetstep.sbatch"
    elif len(bad) == total > 2:
        headline += ", so it is the recipe, or what they share"
    else:
        Attempt(world.info.folder).tell_bad_nodes(surely)
    message = f"{headline}: {'; '.join(f'{node}: {why}' for node, why in bad.items())}{how}"
    first = next(iter(bad))
    rank = findings.ranks[first][0]
    Failure(rank, world.workers.name(rank), first, VERB, "", message).record(world.info.folder)
    raise BadNodes(headline)
