"""Check the nodes of a world whose nodes are pretended, in ranks that are forked from one process."""

import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from pipeline import node_checks
from pipeline.config import ClusterConfig, ComponentConfig, TimeoutsConfig
from pipeline.config.cluster import NodeChecksConfig
from pipeline.files import rank_log
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, WorkerGroups, World, join, leave, open_store, wait_for_all
from pipeline.node import torch_features
from pipeline.node_checks import probe, ring

TIMEOUTS = TimeoutsConfig(join=60, silence=60)
CHECKS = NodeChecksConfig(min_gb_per_s=0.003)  # busy machines have shown 0.028 on healthy ranks


def break_node(fault: str | None, info: RankInfo) -> RankInfo:
    """Install the fault of this rank's node. Faults that need broken hardware replace a Python function."""
    match fault:
        case "clock":
            real = time.time
            time.time = lambda: real() + 3600
        case "stale folder":  # as it was when the rank joined
            stale = info.folder.parent / f"stale{info.rank}"
            shutil.copytree(info.folder, stale)
            return replace(info, folder=stale)
        case "other code":
            copy = info.folder.parent / f"code{info.rank}"
            for part in probe.SOURCES:
                shutil.copytree(probe.ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            (copy / "pipeline/main.py").write_text("an older version")
            probe.ROOT = copy
        case "full":
            probe._statvfs_gb = lambda folder: 0.001
        case "slow":
            real_send = dist.isend

            def slow_send(message, *to, **keywords):
                time.sleep(message.numel() / 0.5e6)  # one way at 0.5 MB/s, the other fast: 1 MB/s
                return real_send(message, *to, **keywords)

            dist.isend = slow_send
        case "dead":
            send = dist.isend
            dist.isend = lambda message, *to, **keywords: (
                _Nothing() if message.numel() > 1000 else send(message, *to, **keywords)
            )
        case "other network":  # than NCCL takes in the image of the other component
            real_versions = probe.versions
            probe.versions = lambda uses_gpus: real_versions(uses_gpus) | {probe.NETWORK: "Socket"}
        case "one network":
            real_versions = probe.versions
            probe.versions = lambda uses_gpus: real_versions(uses_gpus) | {probe.NETWORK: "IB"}
        case "older Python":
            real_versions = probe.versions
            probe.versions = lambda uses_gpus: real_versions(uses_gpus) | {"python": "3.1"}
        case "other torch":  # one that lacks what train ranks call
            torch_features.NEEDED["torch.nn.attention:absent"] = ""
        case "read-only cache":
            os.environ["VLLM_CACHE_ROOT"] = "/proc/vllm"
        case "stuck":
            probe.versions = lambda uses_gpus: time.sleep(600)
    return info


class _Nothing:
    def wait(self) -> None:
        pass


def rank_main(run_dir: Path, nodes: list[str], rank: int, faults: dict[str, str]) -> None:
    rank_log.log_to_stderr()
    probe.SHARED_S, ring.PROBE_BYTES = 1.0, 1 << 18  # longer than a slow node needs
    if {"dead", "stuck"} & set(faults.values()):
        ring.LINK_S, node_checks.PROBE_TIMEOUT_S = 3.0, 8.0
    size, local_rank = len(nodes), nodes[:rank].count(nodes[rank])
    info = RankInfo(rank, size, local_rank, nodes[rank], "127.0.0.1", run_dir / "attempts/1")
    workers = WorkerGroups(tuple(range(size)), (), ())
    if "other network" in faults.values():  # the last rank is a generate rank
        workers = WorkerGroups(tuple(range(size - 1)), (size - 1,), ((size - 1,),))
    world = World(info, workers, open_store(info, TIMEOUTS.join))
    watchdog = Watchdog(world, TIMEOUTS)
    try:
        watchdog.start()
        wait_for_all(world, TIMEOUTS.join)
        join(world)
        world.info = break_node(faults.get(info.node), info)
        node_checks.check(world, ClusterConfig(node_checks=CHECKS, generate=ComponentConfig()))
        dist.barrier(world.spanning)
    except Exception as error:
        watchdog.fail(error)
        raise
    watchdog.stop()
    leave(world, TIMEOUTS.silence)


def main(run_dir: Path, nodes: list[str], faults: dict[str, str]) -> None:
    """End with 0 if all ranks do. A rank that lingers after rank 0 failed ends with it, as the launcher would see to.

    nodes: each rank's node. faults: {node: fault}.
    """
    children = []
    for rank in range(len(nodes)):
        if (child := os.fork()) == 0:
            status = 1
            log = os.open(run_dir / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                rank_main(run_dir, nodes, rank, faults)
                status = 0
            except Exception:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.waitpid(children[0], 0)[1]]
    for child in children[1:]:
        if statuses[0]:
            os.kill(child, signal.SIGKILL)
        statuses.append(os.waitpid(child, 0)[1])
    sys.exit(any(statuses))
