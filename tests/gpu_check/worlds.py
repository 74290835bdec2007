"""Join a world of one rank per GPU as a run does it: store, groups, node checks, `connect`."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline import node_checks
from pipeline.config import ClusterConfig, ComponentConfig
from pipeline.job.world import RankInfo, WorkerGroups, World, connect, join, leave, open_store, wait_for_all
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place
from tests.world.secret import write_secret

TIMEOUT_S = 60.0
ON_THE_CPU = 2  # ranks


def check(place: Place) -> Measurement:
    """Check a world of train ranks."""
    count, run_dir = place.gpus or ON_THE_CPU, place.folder / "world"
    run_dir.mkdir()
    write_secret(run_dir)
    reports = ranks.over(count, _rank, run_dir, place, count)
    measured = Measurement(
        {f"{name}, s": max(report["seconds"][name] for report in reports) for name in reports[0]["seconds"]}, f"{count} ranks"
    )
    measured.details = {"nodes": reports[0]["nodes"]}
    measured.problems = [problem for report in reports for problem in report["problems"]]
    return measured


def _rank(rank: int, _: Path, run_dir: Path, place: Place, count: int) -> dict:
    """Return {"seconds": of each step, "problems", "nodes": nodes.json}."""
    info = RankInfo(rank, count, rank, socket.gethostname(), "127.0.0.1", run_dir / "attempts/1")
    report: dict = {"seconds": {}, "problems": [], "nodes": None}
    world = World(info, WorkerGroups(tuple(range(count)), (), ()), open_store(info, TIMEOUT_S))
    cluster = ClusterConfig(train=ComponentConfig(gpus_per_node=place.gpus))
    steps = {
        "wait for all": lambda: wait_for_all(world, TIMEOUT_S),
        "join": lambda: join(world),
        "check the nodes": lambda: node_checks.check(world, cluster),
        "connect": lambda: connect(world),
        "all-reduce": lambda: report["problems"].extend(_all_reduce(world)),
    }
    for name, step in steps.items():
        start = time.perf_counter()
        try:
            step()
        except node_checks.BadNodes:  # the world works all the same
            report["problems"].append(json.loads((info.folder / "failure.json").read_text())["message"])
        report["seconds"][name] = time.perf_counter() - start
    if rank == 0:
        report["nodes"] = json.loads((info.folder / "nodes.json").read_text())
    leave(world, TIMEOUT_S)
    return report


def _all_reduce(world: World) -> list[str]:
    """Sum the ranks' numbers on the device and on the host. Return what is wrong."""
    problems = []
    for device in {world.device, torch.device("cpu")}:
        numbers = torch.full((1 << 20,), world.rank, device=device)
        dist.all_reduce(numbers, group=world.own)
        if not bool((numbers == sum(range(world.size))).all()):
            problems.append(f"rank {world.rank}: a sum over all ranks on {device.type} is wrong")
    return problems
