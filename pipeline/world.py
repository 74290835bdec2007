"""The world: every rank of the job, the components they form, and every process group that crosses components.

`join` is the one place that creates cross-component groups. It joins the spanning world, makes those groups while the spanning
world is torch's default group, then makes the rank's own component the default, because Megatron, FSDP and vLLM all take the
default group for their own. Nobody else creates a cross-component group.

A `World` also carries the mail between ranks (`pipeline/store`, which lets in only who knows the run's secret; `remote` speaks
through it; each node of a large world has a relay of it) and the rank's activity: which verb it runs and in which phase.
`watchdog.py` turns those into errors that name the missing rank.

Left out: rejoining after a rank was lost (the run restarts from its checkpoint instead).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pipeline import network_interface
from pipeline.config import Recipe, colocated, engine_ranks, generates, ranks, serves_rewards
from pipeline.sandbox import linux
from pipeline.storage import listed
from pipeline.store import relay
from pipeline.store.auth import attempt_key
from pipeline.store.client import RunStore
from pipeline.store.gloo import GlooAuthenticator
from pipeline.store.server import Address, start
from pipeline.timeline import Timeline

NEVER = timedelta(days=365)  # waits that the watchdog bounds
REACHED = "reached"
"""This key of the store holds the address at which ranks reach rank 0's node. It is missing where all do so over loopback."""
ADDRESS = "address"
"""This key holds the address that ranks which reach rank 0 over loopback use for gloo. Where all ranks are on one machine it is
loopback, for all of them."""
LAZY = "TORCH_GLOO_LAZY_INIT"  # read by torch
RELAYED_FROM = 256
"""Ranks from which on each node has a relay. Fewer cost rank 0's store little, and a relay is one more part that can fail."""
BEATS_PER_S = 4096
"""Heartbeats that rank 0 looks at in a second."""


@dataclass(frozen=True)
class RankInfo:
    """Where the launcher put this process."""

    rank: int
    size: int
    local_rank: int
    node: str
    master: str  # an address of rank 0's node
    folder: Path  # this attempt's folder inside the run folder, on the shared file system

    @property
    def run_dir(self) -> Path:
        """Attempts are in its attempts/."""
        return self.folder.parents[1]

    @classmethod
    def from_environment(cls, run_dir: Path) -> RankInfo:
        env = os.environ
        return cls(
            rank=int(env["HETSTEP_RANK"]),
            size=int(env["HETSTEP_WORLD_SIZE"]),
            local_rank=int(env["HETSTEP_LOCAL_RANK"]),
            node=env["HETSTEP_NODE"],
            master=env["HETSTEP_MASTER_ADDR"],
            folder=run_dir / "attempts" / env["HETSTEP_ATTEMPT"],
        )


@dataclass(frozen=True)
class WorkerGroups:
    """Who is who, known from the recipe alone."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]  # the generate ranks, one tuple per engine
    reward: tuple[int, ...] = ()  # empty unless the reward model has ranks of its own
    colocated: bool = False  # the train and the generate ranks of a node share its GPUs

    @classmethod
    def of(cls, recipe: Recipe) -> WorkerGroups:
        train = tuple(range(ranks(recipe.cluster.train)))
        if not generates(recipe):
            return cls(train, (), ())
        size = engine_ranks(recipe.policy.generation.vllm_cfg)
        generate = tuple(range(len(train), len(train) + ranks(recipe.cluster.generate)))
        engines = tuple(generate[i : i + size] for i in range(0, len(generate), size))
        first = len(train) + len(generate)
        reward = tuple(range(first, first + ranks(recipe.cluster.reward))) if serves_rewards(recipe) else ()
        return cls(train, generate, engines, reward, colocated(recipe))

    def by_component(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each component, none for one that the run does not have."""
        return {"train": self.train, "generate": self.generate, "reward": self.reward}

    def name(self, rank: int) -> str:
        if rank in self.train:
            return "train"
        return "reward" if rank in self.reward else "generate"

    def engine(self, rank: int) -> tuple[int, ...]:
        return next(engine for engine in self.engines if rank in engine)


@dataclass(frozen=True)
class Activity:
    """What a rank is doing, as its heartbeat tells."""

    verb: str = "join"
    phase: str = ""


class World:
    """One rank's view of the job."""

    def __init__(self, info: RankInfo, workers: WorkerGroups, store: RunStore):
        self.info = info
        self.rank = info.rank
        self.size = info.size
        self.workers = workers
        self.component = workers.name(info.rank)
        self.store = store
        self.activity = Activity()
        self.activity_changed = threading.Event()  # so that the watchdog tells it at once
        self.timeline = Timeline(_about(info, workers), workers.by_component())
        self.device = _device(info)
        # Where tensors are that travel over `spanning` and `refit`: NCCL refuses two ranks on a GPU; gloo wants host memory.
        self.carrier = torch.device("cpu") if workers.colocated else self.device
        self.spanning: dist.ProcessGroup | None = None  # all ranks; what travels over it from one to another
        self.own: dist.ProcessGroup | None = None  # the train component, the reward component, or this generate rank's engine
        self.refit: dist.ProcessGroup | None = None  # rank 0 and all generate ranks, for a broadcast; None if nobody generates

    @contextmanager
    def phase(self, phase: str, verb: str | None = None) -> Iterator[None]:
        """Say what this rank is doing; the watchdog names it if it does not end, or ends with an error."""
        before = self.activity
        self._set(Activity(verb or before.verb, phase))
        yield  # an error leaves it as it is, to be told with the error
        self._set(before)

    def _set(self, activity: Activity) -> None:
        self.activity = activity
        self.activity_changed.set()
        self.timeline.enter(activity.verb, activity.phase)

    def nodes(self) -> dict[int, str]:
        """Return the node of every rank. Only after `wait_for_all`."""
        names = self.store.multi_get([f"here/{rank}" for rank in range(self.size)])
        return {rank: name.decode() for rank, name in enumerate(names)}

    def describe(self, rank: int) -> str:
        return f"rank {rank} ({self.workers.name(rank)})"


def _about(info: RankInfo, workers: WorkerGroups) -> dict[str, Any]:
    """Who writes a timeline."""
    component = workers.name(info.rank)
    engine = workers.engines.index(workers.engine(info.rank)) if component == "generate" else None
    return {"rank": info.rank, "realm": component, "engine": engine, "node": info.node}


def _device(info: RankInfo) -> torch.device:
    """This rank's GPU. Where each rank is shown only its own, that is number 0 for all."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", info.local_rank % torch.cuda.device_count())


def heartbeat_interval_s(size: int, silence_s: float) -> float:
    """Return the seconds between two heartbeats of a rank, in which it tells what it does and looks at what others do.

    silence_s: `cluster.timeouts.silence`.
    """
    return min(max(1.0, size / BEATS_PER_S), silence_s / 10)


def open_store(info: RankInfo, timeout_s: float, silence_s: float = 60.0, relayed_from: int = RELAYED_FROM) -> RunStore:
    """The store that rank 0 serves. Its port is fresh for each attempt and is told through the attempt's folder.

    silence_s: `cluster.timeouts.silence`, for this node's relay. Raises TimeoutError if rank 0 or that does not appear, and
    what `attempt_key`, `RunStore` and `relay.start` raise.
    """
    card = info.folder / "rendezvous.json"
    key = attempt_key(info.run_dir, info.folder.name)
    if info.rank == 0:
        process, address = start(info.master, key)
        store = RunStore(address, key, timeout_s)
        store.process = process
        store.set(f"relay/{info.node}", "")  # the store itself is near
        info.folder.mkdir(parents=True, exist_ok=True)
        beside = card.with_suffix(".tmp")
        beside.write_text(json.dumps(address._asdict()))
        beside.replace(card)
        return store
    deadline = time.monotonic() + timeout_s
    while not listed(card):
        if time.monotonic() > deadline:
            raise TimeoutError(f"verb 'join': rank 0 (train) has not appeared within {timeout_s:g} s (no {card})")
        time.sleep(0.1)
    address = Address(**json.loads(card.read_text()))
    store = RunStore(address, key, timeout_s)
    if info.size >= relayed_from:
        _find_relay(store, info, address, key, silence_s)
    return store


def _find_relay(store: RunStore, info: RankInfo, address: Address, key: bytes, silence_s: float) -> None:
    """The first rank of a node that comes starts the node's relay; but on rank 0's node there is none."""
    name = f"relay/{info.node}"
    if not store.check([name]):
        own = str(info.rank).encode()
        if store.compare_set(f"{name}/by", "", own) == own:
            interval_s, timeout_s = heartbeat_interval_s(info.size, silence_s), store.timeout.total_seconds()
            store.relay_process, store.relay = relay.start(address, key, info.rank, interval_s, timeout_s)
            store.set(name, json.dumps(store.relay._asdict()))
            return
    try:
        found = store.get(name)
    except dist.DistStoreError:
        starter, waited_s = int(store.get(f"{name}/by")), store.timeout.total_seconds()
        raise TimeoutError(f"verb 'join': rank {starter} has not started {info.node}'s relay within {waited_s:g} s") from None
    if found:
        store.relay = Address(**json.loads(found))


def wait_for_all(world: World, timeout_s: float) -> None:
    """Every rank says that it is here; rank 0 waits for all. Raises TimeoutError naming who has not come."""
    mine, rank_0 = world.store.addresses()
    if world.info.local_rank == 0 and not network_interface.is_loopback(mine):
        world.store.set(REACHED, rank_0)
    world.store.set(f"here/{world.rank}", world.info.node)
    if world.rank:
        return
    others = [f"here/{rank}" for rank in range(1, world.size)]
    try:
        world.store.wait(others, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        nodes = world.store.exchange("here/0", world.info.node.encode(), others)
        names = ", ".join(world.describe(rank) for rank, node in enumerate(nodes, 1) if node is None)
        raise TimeoutError(f"verb 'join': after {timeout_s:g} s (cluster.timeouts.join) there is no sign of {names}") from None


def carriers(device: torch.device) -> str:
    """Return the backends of a group of ranks with such devices: gloo for tensors of the host, NCCL for those of GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def join(world: World) -> None:
    """Form the spanning world and its groups, then make this rank's component torch's default group. After `wait_for_all`.

    From here on each gloo group of this process is proven when it is made (`store/gloo.py`).

    In a large world gloo connects two ranks when they first speak. Without that, each rank writes an address for each other one
    and reads all that all have written, so that the store carries bytes by the cube of the ranks (3 MB for 64 of them), and it
    has a connection to every other rank. When two ranks first speak a send waits for its receiver, which must not happen inside
    a refit: worlds whose refit goes over gloo connect all ranks here. `_meet_rank_0` connects every rank with rank 0 and proves
    the two. Other pairs are not proven then: over gloo they send each other bodies of remote calls only, which have digests.
    """
    _choose_interface(world)
    # Of every group whose maker names no timeout, as those of FSDP's mesh and of vLLM: torch's 10 minutes would end a rank
    # before the watchdog says who is missing.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = NEVER
    workers, device = world.workers, world.device
    backend = carriers(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"  # read by gloo: one request for all ranks' addresses, not two for each
    authenticator = GlooAuthenticator(world.store, world.rank, world.describe, world.phase)
    if world.size >= RELAYED_FROM and world.carrier.type == "cuda":
        before = os.environ.get(LAZY)
        os.environ[LAZY] = "1"  # for these two groups; a library may send over its own in other ways
        _make_spanning(world)
        if before is None:
            del os.environ[LAZY]
        _meet_rank_0(world, authenticator)
        authenticator.install()
    else:
        authenticator.install()
        _make_spanning(world)
    own = (workers.train, *workers.engines, *([workers.reward] if workers.reward else []))
    for members in own:  # every rank makes every group, in the same order
        group = dist.new_group(members, backend=backend, timeout=NEVER)
        world.own = group if world.rank in members else world.own
    dist.group.WORLD = world.own


def _make_spanning(world: World) -> None:
    """Make the groups of ranks of several components."""
    across = "gloo" if world.workers.colocated else carriers(world.device)
    store = dist.PrefixStore("world", world.store)
    dist.init_process_group(across, store=store, rank=world.rank, world_size=world.size, timeout=NEVER)
    world.spanning = dist.group.WORLD
    if world.workers.generate:
        world.refit = dist.new_group((0, *world.workers.generate), backend=across, timeout=NEVER)


def connect(world: World) -> None:
    """Make the spanning group's communicator. Every rank calls this after `join`, when the nodes have passed their checks.

    NCCL makes a communicator at its group's first use and waits for all ranks, for ever where images differ in NCCL. Ranks of a
    reward model take part in no refit, and not every other rank has messages in the first round of one.
    """
    with world.phase("connect all ranks", verb="join"):  # bounded by cluster.timeouts.join
        dist.all_reduce(torch.zeros(1, device=world.carrier), group=world.spanning)


def _choose_interface(world: World) -> None:
    """Set gloo's network interface, unless the user has chosen one.

    It is the one over which this rank reaches rank 0. On rank 0's node that may be loopback: then it is the one at which ranks
    of other nodes reach rank 0. Where all ranks are on one node it is loopback, whatever name they reach rank 0 by.
    """
    given = network_interface.check_given()
    mine, _ = world.store.addresses()
    alone = network_interface.is_loopback(mine)
    if world.rank == 0:
        (reached,) = world.store.exchange("here/0", world.info.node.encode(), [REACHED])
        one_node = len(set(world.nodes().values())) == 1
        world.store.set(ADDRESS, network_interface.LOOPBACK if one_node else (reached or mine) if alone else mine)
    if not given:
        address = world.store.get(ADDRESS).decode()
        network_interface.use(address if alone or network_interface.is_loopback(address) else mine)


def _meet_rank_0(world: World, authenticator: GlooAuthenticator) -> None:
    """Connect every rank with rank 0, so that no later send between the two waits for the other end, and prove both."""
    linux.raise_open_files()  # for as many connections as there are ranks in the world, or in this rank's component
    store = dist.PrefixStore("star", world.store)
    authenticator.offer(store, world.rank)
    others = range(1, world.size) if world.rank == 0 else [0]
    authenticator.authenticate(world.spanning._get_backend(torch.device("cpu")), store, others)


def leave(world: World, timeout_s: float) -> None:
    """End a run that went well: rank 0, whose end is the store's, goes last. The watchdog has been stopped before."""
    world.store.set(f"bye/{world.rank}", "")
    if world.rank == 0:
        world.store.wait([f"bye/{rank}" for rank in range(world.size)], timedelta(seconds=timeout_s))
    if relaying := world.store.relay_process:  # other ranks of this node may still go through it
        relaying.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            relaying.wait(timeout_s)
