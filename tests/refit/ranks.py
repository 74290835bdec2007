"""RefitCoordinator between processes: train ranks 0 and 1, generate ranks 2 and 3, and a model with every awkward tensor.

`run` starts them; what each does is a function of a test module, called SPMD with (world, folder, argument). The backends are
stand-ins that hold tensors and say where these lie; generate ranks are one engine of two ranks, or two engines of one.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.boxes import Box, Piece, Region, region, whole
from pipeline.config import RefitConfig
from pipeline.config.cluster import NetworkConfig
from pipeline.files.encoding import decode, encode
from pipeline.refit.digest import compare
from pipeline.refit.plan import schedule
from pipeline.refit.planned import PlannedRefit
from pipeline.refit.protocol import RefitReport
from pipeline.refit.tables import RefitPlan, layout_table
from tests import cuda_world, fork_server

TRAIN, GENERATE = (0, 1), (2, 3)
BIAS = "gate.e_score_correction_bias"


@dataclass(frozen=True)
class Model:
    shapes: dict[str, tuple[int, ...]]  # on disk
    units: dict[str, tuple[tuple[str, ...], ...]]  # each tensor of a unit: the names of the tensors whose rows it stacks
    cut: dict[str, int]  # the dimension that an engine's ranks shard; the others are replicated
    behind: tuple[str, ...] = ()  # units whose target is not what the engine reads
    wider: int = 0  # extra columns of fused tensors
    column_major: tuple[str, ...] = ()  # on the train ranks


AWKWARD = Model(
    shapes={
        "embed": (50, 24),
        "q": (16, 24),
        "k": (8, 24),
        "v": (8, 24),
        "o": (24, 16),
        "gate": (40, 24),
        "up": (40, 24),
        "down": (24, 40),
        "norm": (24,),
        "bias": (5,),
        "experts": (4, 6, 10),  # split into columns of 5, which are not whole words
        "scale": (),
        BIAS: (7,),
    },
    units={
        "embed": (("embed",),),
        "qkv": (("q", "k", "v"),),
        "mlp": (("gate", "up"),),
        "out": (("o",), ("down",)),
        "rest": (("norm",), ("bias",), ("experts",), ("scale",), (BIAS,)),
    },
    cut={"embed": 0, "q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1, "experts": 2},
    behind=("mlp", "rest"),
    wider=3,
    column_major=("q", "o", "up", "experts"),
)


@dataclass
class World:
    rank: int
    device: torch.device
    spanning: dist.ProcessGroup
    own: dist.ProcessGroup  # the realm
    refit: dist.ProcessGroup | None  # rank 0 and the generate ranks
    carrier: torch.device | None = None  # None: the device
    phases: list[str] = field(default_factory=list)
    info: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(node="one"))

    def __post_init__(self):
        self.carrier = self.carrier or self.device

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        self.phases.append(phase)
        yield


def run(work, folder: Path, argument=None, cuda: str = "") -> None:
    """Run `work(world, folder, argument)` on four ranks. Raises the first error that one of them raised.

    cuda: "apart", a GPU for each rank and NCCL; "shared", the GPUs that exist and gloo.
    """
    _start(work, folder, argument, cuda).join()


def run_to_the_end(work, folder: Path, argument) -> None:
    """Do the same, but after one rank's failure the others run until they finish or learn of it."""
    for process in _start(work, folder, argument, "", timeout_s=5).processes:
        process.join()


def _start(work, folder: Path, argument, cuda: str, timeout_s: int = 60) -> mp.ProcessContext:
    arguments = (work, folder, argument, cuda, timeout_s)
    if cuda:
        return mp.start_processes(_process, arguments, nprocs=4, start_method="spawn", join=False)
    return fork_server.start(_process, arguments, 4)


def _process(rank: int, work, folder: Path, argument, cuda: str, timeout_s: int) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    carrier = torch.device("cpu") if cuda == "shared" else device
    timeout = datetime.timedelta(seconds=timeout_s)
    cuda_world.join(carrier, init_method=f"file://{folder / 'store'}", rank=rank, world_size=4, timeout=timeout)
    spanning = dist.group.WORLD
    realms = [dist.new_group(ranks, timeout=timeout) for ranks in (TRAIN, GENERATE)]
    refit = dist.new_group((0, *GENERATE), timeout=timeout)
    own = dist.group.WORLD = realms[rank in GENERATE]  # as in a run
    work(World(rank, device, spanning, own, refit if rank != 1 else None, carrier), folder, argument)
    dist.barrier(group=spanning)
    dist.group.WORLD = spanning
    dist.destroy_process_group()


# ---- stand-ins --------------------------------------------------------------------------------------------------------


def kept(name: str, precision: torch.dtype) -> torch.dtype:
    """The precision of a tensor on either end and on the wire."""
    return torch.float32 if name == BIAS else precision


def weights(model: Model, version: int, precision: torch.dtype) -> dict[str, torch.Tensor]:
    """Return full tensors. Each version changes 3% of the previous one's values; every fourth all."""
    first = version - version % 4
    rng = torch.Generator().manual_seed(first)
    full = {name: torch.randn(shape, generator=rng).to(kept(name, precision)) for name, shape in model.shapes.items()}
    for later in range(first + 1, version + 1):
        rng = torch.Generator().manual_seed(later)
        for tensor in full.values():
            tensor[torch.rand(tensor.shape, generator=rng) < 0.03] = later
    return full


def part_of(shape: Sequence[int], dim: int | None, part: int, parts: int) -> Box:
    """Return the part that torch.chunk gives, whose last one may be smaller; everything for dim None."""
    offset, size = [0] * len(shape), list(shape)
    if dim is not None:
        step = -(-shape[dim] // parts)
        offset[dim] = min(part * step, shape[dim])
        size[dim] = min((part + 1) * step, shape[dim]) - offset[dim]
    return Box(tuple(offset), tuple(size))


class Train:
    """Rows of every tensor of more than one dimension; other tensors are whole."""

    def __init__(self, model: Model, part: int, parts: int, precision: torch.dtype, device: torch.device):
        self.regions: list[Region] = []
        self._tensors: dict[str, torch.Tensor] = {}
        for name, shape in model.shapes.items():
            box = part_of(shape, 0 if len(shape) > 1 else None, part, parts)
            tensor = torch.zeros(box.size, dtype=kept(name, precision), device=device)
            if name in model.column_major:
                tensor = tensor.mT.contiguous().mT
            self._tensors[name] = tensor
            self.regions.append(region(Piece(name, box, whole(box.size)), name, tensor.stride()))
        self.table = layout_table(self.regions, model.shapes)

    def local_tensor(self, tensor: str) -> torch.Tensor:
        return self._tensors[tensor]

    def fill(self, full: dict[str, torch.Tensor]) -> None:
        for held in self.regions:
            self._tensors[held.name].copy_(full[held.name][held.box.within(whole(full[held.name].shape))])


class Generate:
    """A rank of an engine, and the update of its weights. Fused tensors are padded."""

    def __init__(self, model: Model, part: int, parts: int, precision: torch.dtype, device: torch.device):
        self.live: dict[str, torch.Tensor] = {}
        self.regions: list[Region] = []
        self.units: list[str] = []
        self.version = 0
        self.finished: list[str] = []
        self._behind = model.behind
        self._open: dict[str, torch.Tensor] = {}
        for unit, tensors in model.units.items():
            for i, names in enumerate(tensors):
                cuts = {name: part_of(model.shapes[name], model.cut.get(name), part, parts) for name in names}
                size = list(cuts[names[0]].size)
                if len(names) > 1:
                    size = [sum(cut.size[0] for cut in cuts.values()), size[1] + model.wider]
                tensor = f"{unit}.{i}"
                self.live[tensor] = torch.zeros(size, dtype=kept(names[0], precision), device=device)
                row = 0
                for name, cut in cuts.items():
                    target = Box((row, *[0] * (len(cut.size) - 1)) if cut.size else (), cut.size)
                    row += cut.size[0] if cut.size else 0
                    self.regions.append(region(Piece(name, cut, target), tensor, self.live[tensor].stride()))
                    self.units.append(unit)
        self.table = layout_table(self.regions, model.shapes, self.units)

    def in_place(self, unit: str) -> bool:
        return unit not in self._behind

    def target(self, unit: str, tensor: str) -> torch.Tensor:
        assert unit not in self.finished, unit
        if self.in_place(unit):
            return self.live[tensor]
        if tensor not in self._open:
            self._open[tensor] = torch.full_like(self.live[tensor], torch.nan)
        return self._open[tensor]

    def finish(self, unit: str) -> None:
        assert unit not in self.finished, unit
        self.finished.append(unit)
        for tensor in [tensor for tensor in self._open if tensor.startswith(f"{unit}.")]:
            self.live[tensor].copy_(self._open.pop(tensor))

    def commit(self, version: int) -> None:
        assert set(self.finished) == set(self.units)
        self.version, self.finished = version, []

    def view(self, held: Region) -> torch.Tensor:
        live = self.live[held.tensor]
        return live.as_strided(held.box.size, held.strides, live.storage_offset() + held.offset)

    def check(self, full: dict[str, torch.Tensor]) -> None:
        for held in self.regions:
            expected = full[held.name][held.box.within(whole(full[held.name].shape))]
            assert torch.equal(self.view(held).cpu().to(expected.dtype), expected), held.name

    def owned(self, precision: torch.dtype) -> int:
        """Return the bytes on the wire."""
        return sum(held.box.numel * kept(held.name, precision).itemsize for held in self.regions)


# ---- a run without its coordinator ------------------------------------------------------------------------------------

Backends = dict[int, Train | Generate]
Engines = Sequence[Sequence[int]]


def backends(model: Model, engines: Engines, train: torch.dtype, generate: torch.dtype, device: torch.device) -> Backends:
    """Gather all ranks' layouts by rank, so that every rank can plan."""
    made: Backends = {rank: Train(model, part, len(TRAIN), train, device) for part, rank in enumerate(TRAIN)}
    for engine in engines:
        made |= {rank: Generate(model, part, len(engine), generate, device) for part, rank in enumerate(engine)}
    return made


def planned(
    model: Model, made: Backends, engines: Engines, precision: torch.dtype, bucket_bytes: int, share: bool = False
) -> RefitPlan:
    """share: engines are on one node, so one forwards what it received to the other."""
    train, generate = ({rank: made[rank].table for rank in ranks} for ranks in (TRAIN, GENERATE))
    nodes = {rank: "train" if rank in TRAIN else "generate" if share else str(rank) for rank in made}
    return schedule(train, generate, engines, model.shapes, precision.itemsize, bucket_bytes, nodes, NetworkConfig()).plan()


def prepared(
    world: World,
    backend: Train | Generate,
    precision: torch.dtype,
    transport: str,
    plan: RefitPlan,
    digest: bool = True,
    ipc: bool = False,
) -> PlannedRefit:
    refit = PlannedRefit(world, RefitConfig(digest=digest), precision, transport, ipc)
    units = backend.units if isinstance(backend, Generate) else None
    refit.prepare(backend.regions, units, plan.ranks[world.rank])
    return refit


def transfer(world: World, refit: PlannedRefit, backend: Train | Generate) -> RefitReport:
    return refit.send(backend) if world.rank in TRAIN else refit.receive(backend)


def two_refits(world: World, folder: Path, transport: str, bucket: int, spoil: Callable[[], None], ipc: bool = False) -> None:
    """Refit twice and call `spoil` before the second. Write this rank's result to `seen-RANK`, and end its process.

    bucket: maximum bytes that a rank sends in a round.
    """
    made = backends(AWKWARD, (GENERATE,), torch.float32, torch.float32, world.device)
    plan = planned(AWKWARD, made, (GENERATE,), torch.float32, bucket)
    own = made[world.rank]
    refit = prepared(world, own, torch.float32, transport, plan, ipc=ipc)
    error = ""
    for version in (1, 2):
        if version == 2:
            spoil()
        if world.rank in TRAIN:
            own.fill(weights(AWKWARD, 4 * version, torch.float32))
        world.phases.clear()
        try:
            report = transfer(world, refit, own)
            agree(world, AWKWARD, plan, report, folder, version)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            break
        if world.rank in GENERATE:
            own.commit(version)
    served = own.version if world.rank in GENERATE else None
    (folder / f"seen-{world.rank}").write_text(json.dumps({"error": error, "phase": world.phases[-1], "served": served}))
    os._exit(0)


def agree(world: World, model: Model, plan: RefitPlan, report: RefitReport, folder: Path, version: int) -> None:
    """Do rank 0's check before it orders the commit, here on every rank. Raises RefitError."""
    reports = [folder / f"report-{version}-{rank}" for rank in range(4)]
    reports[world.rank].write_bytes(encode(report))
    dist.barrier(group=world.spanning)
    found = [decode(path.read_bytes(), RefitReport) for path in reports]
    dist.barrier(group=world.spanning)
    compare(plan, list(model.shapes), {r: found[r] for r in TRAIN}, {r: found[r] for r in GENERATE}, version)
