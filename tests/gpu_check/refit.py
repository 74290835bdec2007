"""Measure refits between train and generate processes of this machine, on one GPU or with a GPU each.

Half of the processes train: each holds rows of every tensor, as under FSDP2. The others are one engine, whose tensors are split
over them. They hold a model of random weights of Llama's shape.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.config.cluster import NetworkConfig
from pipeline.job.world import carriers
from pipeline.refit.digest import compare
from pipeline.refit.plan import schedule
from pipeline.refit.planned import PlannedRefit
from pipeline.refit.protocol import RefitReport
from pipeline.refit.tables import RefitPlan
from tests.benchmarks import refit_transfer
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place
from tests.refit import ranks as refits

Held = refits.Train | refits.Generate
PRECISION = torch.bfloat16
LAYERS = 40  # of refit_transfer.llama: 1 GB
CHANGED = 0.01
WARM_UP, TURNS = 1, 3
SHARED = {"IPC": ("planned", True), "host": ("planned", False), "delta": ("delta", True)}
"""(transport, whether memory is mapped): as colocated runs do it, through host memory, and only what has changed."""
APART = {"planned": ("planned", False), "delta": ("delta", False)}


def shared(place: Place) -> Measurement:
    """Measure two train and two generate processes on one GPU."""
    return _refits(place, 2, SHARED, apart=False)


def apart(place: Place) -> Measurement:
    """Measure processes with a GPU each, half of which train; on the CPU four."""
    return _refits(place, max(2, place.gpus // 2), APART, apart=True)


def _refits(place: Place, half: int, kinds: dict[str, tuple[str, bool]], apart: bool) -> Measurement:
    reports: list[Report] = ranks.over(2 * half, _rank, place, half, kinds, apart)
    size = sum(report.bytes for report in reports[half:])
    note = f"{size / 1e9:.3g} GB, {half} + {half} processes; delta: {CHANGED:.0%} of the values changed"
    measured = Measurement(note=note)
    for kind in kinds:
        spent = max(statistics.median(report.seconds[kind]) for report in reports)
        measured.numbers |= {f"{kind} GB/s": size / spent / 1e9, f"{kind} s": spent}
        measured.numbers[f"{kind} digest's share"] = max(
            last.digest / last.total for last in (report.last[kind] for report in reports)
        )
        ends = [{rank: reports[rank].last[kind] for rank in members} for members in (range(half), range(half, 2 * half))]
        measured.attempt({kind: functools.partial(compare, reports[0].plan, reports[0].names, *ends, 1)})
    if unmapped := sum(report.unmapped for report in reports):
        measured.problems.append(f"{unmapped} pairs of processes cannot map each other's memory")
    return measured


@dataclass
class Report:
    """The measurements of a rank."""

    plan: RefitPlan
    names: list[str]  # of all tensors
    bytes: int  # that a generate rank receives
    unmapped: int = 0  # receivers that cannot map this rank's memory, where they should
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each kind of refit
    last: dict[str, RefitReport] = field(default_factory=dict)  # of its last refit


def _rank(rank: int, folder: Path, place: Place, half: int, kinds: dict[str, tuple[str, bool]], apart: bool) -> Report:
    device = torch.device("cuda", rank if apart else 0) if place.device == "cuda" else torch.device("cpu")
    world = _join(rank, folder, device, half, apart)
    model = refit_transfer.llama(LAYERS) if place.full else refits.AWKWARD
    mine, plan = _planned(model, rank, half, device)
    draw = torch.Generator(device).manual_seed(rank)
    for tensor in _rows(mine):
        tensor.normal_(generator=draw)
    report = Report(plan, list(model.shapes), mine.owned(PRECISION) if isinstance(mine, refits.Generate) else 0)
    for kind, (transport, ipc) in kinds.items():
        refit = refits.prepared(world, mine, PRECISION, transport, plan, ipc=ipc)
        if ipc:
            report.unmapped += len(set(refit._sends.peers) - set(refit._sends.mapped_peers))
        report.seconds[kind] = []
        for turn in range(WARM_UP + TURNS):
            for tensor in _rows(mine):
                drawn = torch.rand(tensor.shape, generator=draw, device=device)
                tensor.copy_(torch.where(drawn < CHANGED, tensor + 1, tensor))
            dist.barrier(group=world.spanning)

            def transfer(kind: str = kind, refit: PlannedRefit = refit) -> None:
                report.last[kind] = _transfer(refit, mine)

            seconds = place.seconds(transfer)
            report.seconds[kind] += [seconds] if turn >= WARM_UP else []
        del refit
    dist.barrier(group=world.spanning)
    dist.group.WORLD = world.spanning
    dist.destroy_process_group()
    return report


def _rows(mine: Held) -> list[torch.Tensor]:
    """Return a train rank's own rows. Other tensors are the same on all train ranks, and stay 0."""
    if isinstance(mine, refits.Generate):
        return []
    return [mine.local_tensor(held.name) for held in mine.regions if len(held.box.size) > 1]


def _transfer(refit: PlannedRefit, mine: Held) -> RefitReport:
    if isinstance(mine, refits.Train):
        return refit.send(mine)
    report = refit.receive(mine)
    mine.commit(1)
    return report


def _join(rank: int, folder: Path, device: torch.device, half: int, apart: bool) -> refits.World:
    """Make the groups as `pipeline.job.world` makes them: over gloo where processes share a GPU."""
    train, generate = range(half), range(half, 2 * half)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    across = carriers(device) if apart else "gloo"
    store = dist.FileStore(str(folder / "store"), 2 * half)
    dist.init_process_group(across, store=store, rank=rank, world_size=2 * half, timeout=ranks.TIMEOUT)
    spanning = dist.group.WORLD
    refit_group = dist.new_group([0, *generate], backend=across, timeout=ranks.TIMEOUT)
    groups = [dist.new_group(list(members), backend=across, timeout=ranks.TIMEOUT) for members in (train, generate)]
    own = dist.group.WORLD = groups[rank in generate]
    carrier = device if apart else torch.device("cpu")
    world = refits.World(rank, device, spanning, own, refit_group if rank == 0 or rank in generate else None, carrier)
    dist.all_reduce(torch.zeros(1, device=carrier), group=spanning)  # as `pipeline.job.world.connect` does
    return world


def _planned(model: refits.Model, rank: int, half: int, device: torch.device) -> tuple[Held, RefitPlan]:
    """Return (what this rank holds, the plan). What other ranks hold has no memory here."""
    held = {}
    for each in range(2 * half):
        kind = refits.Train if each < half else refits.Generate
        held[each] = kind(model, each % half, half, PRECISION, device if each == rank else torch.device("meta"))
    tables = [{each: held[each].table for each in members} for members in (range(half), range(half, 2 * half))]
    engines = [list(range(half, 2 * half))]
    nodes, bucket = dict.fromkeys(held, "one"), refit_transfer.BUCKET_BYTES
    return held[rank], schedule(*tables, engines, model.shapes, PRECISION.itemsize, bucket, nodes, NetworkConfig()).plan()
