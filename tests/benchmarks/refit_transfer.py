"""The refit between processes of this machine: planned against broadcast and against bare gloo, by wire and through memory that
both ends map, and the bytes of a delta.

    refit_transfer.main()      runs it all and prints the tables

A 500 MB bf16 model of Llama's shapes. Two train ranks each hold half the rows of every tensor (FSDP2), two generate ranks are
one engine of tensor parallelism 2 with fused QKV and gate_up, which takes everything in place. All contenders take turns in
the same four processes, which compute with one thread each (gloo has one more), between two barriers. Bare gloo moves the
same messages between the same ranks, each in one piece, out of memory that is ready into memory that nobody looks at.

On one machine the wire is a copy by the same cores that pack, write and hash, and what costs CPU overlaps with nothing: so CPU
seconds, of all processes together, say more than wall seconds where others use the machine.

Delta meets values of which a share changed at random places, its least favourable case. Left out: casts, GPUs, sharing.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from pipeline.boxes import whole
from pipeline.files.encoding import decode, encode
from pipeline.refit.broadcast import BroadcastRefit
from pipeline.refit.protocol import RefitReport
from pipeline.refit.tables import RefitPlan
from pipeline.refit.transfer import TAG
from tests.refit import ranks
from tests.refit.ranks import GENERATE, TRAIN, Generate, Model, Train, World

ENGINES = (GENERATE,)
PRECISION = torch.bfloat16
BUCKET_BYTES = 256 << 20  # the recipe's default; the planner takes less for a small model
TURNS = 9
WARM_UP = 2
CHANGED = (0.01, 0.05, 0.5)
BARE, BROADCAST, PLANNED, UNPROVEN = "bare gloo", "broadcast", "planned", "planned, no digest"
MAPPED, UNPROVEN_MAPPED = "planned, ipc", "planned, ipc, no digest"  # policy.generation.colocated.refit


def llama(layers: int = 20) -> Model:
    hidden, inner, key_value, vocabulary = 1024, 2816, 256, 24576
    shapes, units, cut = {"embed_tokens": (vocabulary, hidden)}, {"embed_tokens": (("embed_tokens",),)}, {"embed_tokens": 0}
    layer = {
        "q_proj": (hidden, hidden),
        "k_proj": (key_value, hidden),
        "v_proj": (key_value, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "norm": (hidden,),
    }
    fused = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("norm",))
    for i in range(layers):
        shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        units |= {f"{i}.{names[0]}": (tuple(f"{i}.{name}" for name in names),) for names in fused}
        cut |= {f"{i}.{name}": int(name in ("o_proj", "down_proj")) for name in layer if name != "norm"}
    return Model(shapes, units, cut)


# ---- contenders: called on every rank ---------------------------------------------------------------------------------


class Broadcast:
    """Both ends of the reference broadcast, over the same tensors."""

    def __init__(self, world: World, model: Model, own: Train | Generate):
        self._world, self._model, self._own = world, model, own
        self._refit = BroadcastRefit(world, BUCKET_BYTES)

    def __call__(self) -> RefitReport:
        return self._refit.send(self) if isinstance(self._own, Train) else self._refit.receive(self)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self._model.shapes.items():
            local = self._own.local_tensor(name)
            full = torch.empty(shape, dtype=PRECISION)
            if len(shape) > 1:
                dist.all_gather(list(full.chunk(len(TRAIN))), local, group=self._world.own)
            else:
                full.copy_(local)
            yield name, full

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        held = {region.name: region for region in self._own.regions}
        for name, tensor in weights:
            self._own.view(held[name]).copy_(tensor[held[name].box.within(whole(tensor.shape))])


class Bare:
    """Send the plan's messages, two rounds at a time in flight as in the refit."""

    def __init__(self, world: World, plan: RefitPlan):
        self._world = world
        mine = plan.ranks[world.rank]
        self._rounds: list[list[tuple[Callable, torch.Tensor, int]]] = [[] for _ in range(mine.rounds)]
        for operation, items in ((dist.isend, mine.sends), (dist.irecv, mine.receives)):
            sizes = items.size.prod(axis=1) * PRECISION.itemsize
            for round, peer in sorted(set(zip(items.round.tolist(), items.peer.tolist(), strict=True))):
                size = int(sizes[(items.round == round) & (items.peer == peer)].sum())
                self._rounds[round].append((operation, torch.ones(size, dtype=torch.uint8), peer))

    def __call__(self) -> RefitReport:
        before: list[dist.Work] = []
        for messages in [*self._rounds, []]:
            works = [operation(tensor, peer, self._world.spanning, TAG) for operation, tensor, peer in messages]
            for work in before:
                work.wait()
            before = works
        return RefitReport()


def refit_once(world: World, refit, own: Train | Generate) -> RefitReport:
    report = ranks.transfer(world, refit, own)
    if isinstance(own, Generate):
        own.commit(1)
    return report


# ---- measuring --------------------------------------------------------------------------------------------------------


class Turn(msgspec.Struct):
    """One contender's turn, as measured by one rank."""

    wall: float  # seconds between the barriers
    cpu: float  # seconds of all processes
    report: RefitReport


class Seen(msgspec.Struct):
    """One rank's measurements."""

    turns: dict[str, list[Turn]]
    bytes: int  # tensors that it sends, or receives, in full


def timed(world: World, work: Callable[[], RefitReport]) -> Turn:
    dist.barrier(group=world.spanning)
    wall, cpu = time.perf_counter(), time.process_time()
    report = work()
    dist.barrier(group=world.spanning)
    wall, used = time.perf_counter() - wall, torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.all_reduce(used, group=world.spanning)
    return Turn(wall, used.item(), report)


def delta(share: float) -> str:
    return f"delta, {share:.0%} changed"


def take_turns(world: World, folder: Path, argument: None) -> None:
    model = llama()
    made = ranks.backends(model, ENGINES, PRECISION, PRECISION, world.device)
    plan = ranks.planned(model, made, ENGINES, PRECISION, BUCKET_BYTES)
    own = made[world.rank]
    del made
    rng = torch.Generator().manual_seed(world.rank)
    if isinstance(own, Train):
        for held in own.regions:
            own.local_tensor(held.name).normal_(generator=rng)

    def refit(transport: str, digest: bool, ipc: bool = False) -> Callable[[], RefitReport]:
        return functools.partial(refit_once, world, ranks.prepared(world, own, PRECISION, transport, plan, digest, ipc), own)

    contenders = {BARE: Bare(world, plan), BROADCAST: Broadcast(world, model, own)}
    contenders |= {PLANNED: refit("planned", True), UNPROVEN: refit("planned", False)}
    contenders |= {MAPPED: refit("planned", True, ipc=True), UNPROVEN_MAPPED: refit("planned", False, ipc=True)}
    changes = {delta(share): (share, refit("delta", True)) for share in CHANGED}
    turns: dict[str, list[Turn]] = {name: [] for name in (*contenders, *changes)}
    for _ in range(WARM_UP + TURNS):
        for name, work in contenders.items():
            turns[name].append(timed(world, work))
    for name, (share, work) in changes.items():
        work()  # all of it, since there is no base
        for _ in range(TURNS):
            change(own, share, rng)
            turns[name].append(timed(world, work))
    mine = plan.ranks[world.rank]
    size = sum(int(items.size.prod(axis=1).sum()) for items in (mine.sends, mine.receives)) * PRECISION.itemsize
    (folder / f"seen-{world.rank}").write_bytes(encode(Seen({name: found[-TURNS:] for name, found in turns.items()}, size)))


def change(own: Train | Generate, share: float, rng: torch.Generator) -> None:
    """Flip the lowest bit of that share of all values."""
    if isinstance(own, Train):
        for held in own.regions:
            bits = own.local_tensor(held.name).view(torch.int16)
            bits ^= (torch.rand(bits.shape, generator=rng) < share).to(torch.int16)


# ---- tables -----------------------------------------------------------------------------------------------------------


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(take_turns, Path(folder))
        seen = [decode((Path(folder) / f"seen-{rank}").read_bytes(), Seen) for rank in range(4)]
    train, generate = seen[TRAIN[0]], seen[GENERATE[0]]
    total = sum(seen[rank].bytes for rank in GENERATE)
    first = train.turns
    print(
        f"\nRefit of a {total / 1e6:.0f} MB bf16 model between 2 + 2 processes, FSDP2 dp2 -> tp2, {TURNS} turns:"
        f"\n{'':24s}{'wall s':>8s}{'min':>8s}{'GB/s':>8s}{'CPU s':>8s}{'bytes':>8s}   {'':9s}pack   wire  apply digest (ms)"
    )
    for name, turns in first.items():
        wall, cpu = (median(turns, part) for part in ("wall", "cpu"))
        received = sum(statistics.median(turn.report.received for turn in seen[rank].turns[name]) for rank in GENERATE)
        row = f"{name:24s}{wall:8.3f}{min(turn.wall for turn in turns):8.3f}{total / wall / 1e9:8.2f}{cpu:8.3f}"
        row += f"{(received or total) / total:8.3f}"
        print(row if name == BARE else f"{row}   train    {_parts(turns)}\n{'':59s}generate {_parts(generate.turns[name])}")
    print("ratios of medians:")
    for title, one, other in (
        ("broadcast / planned", BROADCAST, PLANNED),
        ("bare gloo / planned", BARE, PLANNED),
        ("bare gloo / planned, no digest", BARE, UNPROVEN),
        ("planned / planned, ipc", PLANNED, MAPPED),
        ("the same without a digest", UNPROVEN, UNPROVEN_MAPPED),
        *((f"{delta(share)} / planned", delta(share), PLANNED) for share in CHANGED),
    ):
        wall, cpu = (median(first[one], part) / median(first[other], part) for part in ("wall", "cpu"))
        print(f"  {title:40s}{wall:6.2f} in wall seconds {cpu:6.2f} in CPU seconds")
    for realm, one in (("train", train), ("generate", generate)):
        share = statistics.median(turn.report.digest / turn.report.total for turn in one.turns[PLANNED])
        print(f"  digest's share of a {realm} rank's refit {share:6.1%}")


def median(turns: list[Turn], part: str) -> float:
    return statistics.median(getattr(turn, part) for turn in turns)


def _parts(turns: list[Turn]) -> str:
    parts = ("pack", "wire", "apply", "digest")
    return "".join(f"{1e3 * statistics.median(getattr(turn.report, part) for turn in turns):7.0f}" for part in parts)


if __name__ == "__main__":
    main()
