"""The world: every rank of the job, its components' ranks, and every process group that spans components.

Environment ranks hold no tensors, so they join no process group. They have the last numbers, and reach rank 0's store alone.

Only `join` creates spanning groups. It joins the spanning world, and makes the spanning groups while the spanning world is
torch's default group. Then it makes the rank's own group the default, because Megatron, FSDP and vLLM use the default group.

A `World` also holds the connection to the store, over which `rpc` sends messages (`pipeline/store`; each node of a large world
has a relay), and the rank's activity: its verb and phase. `watchdog.py` names a missing rank and its activity in errors.

A lost rank cannot join again: the run restarts from its checkpoint instead.
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
from torch._C._distributed_c10d import PrefixStore  # torch.distributed exports it without a stub
from torch.distributed import distributed_c10d

from pipeline.config import (
    Recipe,
    VLLMConfig,
    colocated,
    engine_ranks,
    environments_apart,
    generates,
    ranks,
    serves_judge,
    serves_rewards,
    trains,
)
from pipeline.files.storage import listed
from pipeline.node import network_interface
from pipeline.observe.rank_timeline import Timeline
from pipeline.sandbox import linux
from pipeline.store import relay
from pipeline.store.auth import attempt_key
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore
from pipeline.store.gloo import GlooAuthenticator

NEVER = timedelta(days=365)  # a timeout for waits that the watchdog bounds
REACHED = "reached"
"""Key in the store of the address at which other nodes reach rank 0. Missing if all ranks use loopback."""
ADDRESS = "address"
"""Key in the store of gloo's address for ranks that reach rank 0 over loopback. On a single node it is loopback."""
LAZY = "TORCH_GLOO_LAZY_INIT"  # environment variable that torch reads
RELAYED_FROM = 256
"""World size from which each node has a relay. Fewer ranks cost rank 0's store little, and a relay may fail."""
MOST_PATHS = 4096
"""Maximum number of pairs (train rank, generate rank) that are all connected at the start. Of more, a refit uses few."""
BEATS_PER_S = 4096
"""Heartbeats that rank 0 reads per second."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's identity and location, from the environment that the launcher sets."""

    rank: int
    size: int
    local_rank: int  # within the component on this node
    node: str
    master: str  # an address of rank 0's node
    folder: Path  # this attempt's folder inside the run folder, on the shared file system

    @property
    def run_dir(self) -> Path:
        """The run folder, two levels above the attempt's folder."""
        return self.folder.parents[1]

    @classmethod
    def from_environment(cls, run_dir: Path) -> RankInfo:
        """Read the HETSTEP_* variables."""
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
    """The ranks of each component and engine, computed from the recipe."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]  # the generate ranks, one tuple per engine
    reward: tuple[int, ...] = ()  # empty unless the reward model has its own ranks
    colocated: bool = False  # the train and the generate ranks of a node share its GPUs
    judge: tuple[int, ...] = ()  # empty unless a generative judge has its own ranks
    judge_engines: tuple[tuple[int, ...], ...] = ()  # the judge ranks, one tuple per engine
    environment: tuple[int, ...] = ()  # empty unless environments have ranks of their own

    @classmethod
    def of(cls, recipe: Recipe) -> WorkerGroups:
        """Number the ranks: train first, then generate, reward, judge and environment. An evaluation has no train ranks."""
        train = tuple(range(ranks(recipe.cluster.train))) if trains(recipe) else ()
        if not generates(recipe):
            return cls(train, (), ())
        generate = tuple(range(len(train), len(train) + ranks(recipe.cluster.generate)))
        engines = _engines(generate, recipe.policy.generation.vllm_cfg)
        begin = len(train) + len(generate)
        reward = tuple(range(begin, begin + ranks(recipe.cluster.reward))) if serves_rewards(recipe) else ()
        begin += len(reward)
        judge = tuple(range(begin, begin + ranks(recipe.cluster.judge))) if serves_judge(recipe) else ()
        begin += len(judge)
        apart = tuple(range(begin, begin + ranks(recipe.cluster.environment))) if environments_apart(recipe) else ()
        judges = _engines(judge, recipe.judge.vllm_cfg)
        return cls(train, generate, engines, reward, colocated(recipe), judge, judges, apart)

    def by_component(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each component; () for a component that the run lacks."""
        names = ("train", "generate", "reward", "judge", "environment")
        return {name: getattr(self, name) for name in names}

    def name(self, rank: int) -> str:
        """Return the component of a rank."""
        return next((name for name, members in self.by_component().items() if rank in members), "generate")

    def engine(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the engine to which a generate or judge rank belongs."""
        return next(engine for engine in (*self.engines, *self.judge_engines) if rank in engine)


def _engines(members: tuple[int, ...], vllm: VLLMConfig) -> tuple[tuple[int, ...], ...]:
    size = engine_ranks(vllm)
    return tuple(members[i : i + size] for i in range(0, len(members), size))


@dataclass(frozen=True)
class Activity:
    """A rank's current verb and phase, as its heartbeat reports them."""

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
        self.activity_changed = threading.Event()  # makes the watchdog send the activity at once
        self.timeline = Timeline(_timeline_header(info, workers), workers.by_component())
        self.device = _device(info)
        # The device of tensors sent over `spanning` and `refit`: NCCL refuses two ranks on a GPU, and gloo needs host memory.
        self.carrier = torch.device("cpu") if workers.colocated else self.device
        self.spanning: dist.ProcessGroup  # all ranks but environment ranks; this and `own` are set by `join`
        self.own: dist.ProcessGroup  # the train ranks, the reward ranks, or this rank's engine
        self.refit: dist.ProcessGroup | None = None  # rank 0 and all generate ranks; None on other ranks, and without refits

    @contextmanager
    def phase(self, phase: str, verb: str | None = None) -> Iterator[None]:
        """Set the phase, and the verb, of this rank for a block; errors and the watchdog name them."""
        previous = self.activity
        self._set(Activity(verb or previous.verb, phase))
        yield  # an error keeps the phase, for the report
        self._set(previous)

    def _set(self, activity: Activity) -> None:
        self.activity = activity
        self.activity_changed.set()
        self.timeline.enter(activity.verb, activity.phase)

    def nodes(self) -> dict[int, str]:
        """Return the node of every rank. Call it after `wait_for_all`."""
        names = self.store.multi_get([f"here/{rank}" for rank in range(self.size)])
        return {rank: name.decode() for rank, name in enumerate(names)}

    def describe(self, rank: int) -> str:
        """Return a rank's name for messages, such as `rank 3 (generate)`."""
        return f"rank {rank} ({self.workers.name(rank)})"


def _timeline_header(info: RankInfo, workers: WorkerGroups) -> dict[str, Any]:
    """Return the header of this rank's timeline."""
    component = workers.name(info.rank)
    engines = {"generate": workers.engines, "judge": workers.judge_engines}.get(component)
    engine = engines.index(workers.engine(info.rank)) if engines else None
    return {"rank": info.rank, "realm": component, "engine": engine, "node": info.node}


def _device(info: RankInfo) -> torch.device:
    """Return this rank's GPU, or the CPU. If a rank sees only its own GPU, this GPU has number 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", info.local_rank % torch.cuda.device_count())


def heartbeat_interval_s(size: int, silence_s: float) -> float:
    """Return the seconds between two heartbeats of a rank. silence_s: `cluster.timeouts.silence`."""
    return min(max(1.0, size / BEATS_PER_S), silence_s / 10)


def open_store(info: RankInfo, timeout_s: float, silence_s: float = 60.0, relayed_from: int = RELAYED_FROM) -> RunStore:
    """Connect to the store. Rank 0 starts it on a free port and writes its address into the attempt's folder.

    silence_s: `cluster.timeouts.silence`, for this node's relay. Raises TimeoutError if rank 0 or the relay does not appear,
    and what `attempt_key`, `RunStore` and `relay.start` raise.
    """
    address_file = info.folder / "rendezvous.json"
    key = attempt_key(info.run_dir, info.folder.name)
    if info.rank == 0:
        process, address = start(info.master, key)
        store = RunStore(address, key, timeout_s)
        store.process = process
        store.set(f"relay/{info.node}", "")  # rank 0's node has no relay
        info.folder.mkdir(parents=True, exist_ok=True)
        temporary = address_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(address._asdict()))
        temporary.replace(address_file)
        return store
    deadline = time.monotonic() + timeout_s
    while not listed(address_file):
        if time.monotonic() > deadline:
            rank_0 = "rank 0, the coordinator,"
            raise TimeoutError(f"verb 'join': {rank_0} has not appeared within {timeout_s:g} s (no {address_file})")
        time.sleep(0.1)
    address = Address(**json.loads(address_file.read_text()))
    store = RunStore(address, key, timeout_s)
    if info.size >= relayed_from:
        _find_relay(store, info, address, key, silence_s)
    return store


def _find_relay(store: RunStore, info: RankInfo, address: Address, key: bytes, silence_s: float) -> None:
    """Set `store.relay`, and start the relay on the node's first rank. Rank 0's node has none."""
    name = f"relay/{info.node}"
    if not store.check([name]):
        this_rank = str(info.rank).encode()
        if store.compare_set(f"{name}/by", "", this_rank) == this_rank:
            interval_s, timeout_s = heartbeat_interval_s(info.size, silence_s), store.timeout_s
            store.relay_process, store.relay = relay.start(address, key, info.rank, interval_s, timeout_s)
            store.set(name, json.dumps(store.relay._asdict()))
            return
    try:
        address_text = store.get(name)
    except dist.DistStoreError:
        starter, waited_s = int(store.get(f"{name}/by")), store.timeout_s
        raise TimeoutError(f"verb 'join': rank {starter} has not started {info.node}'s relay within {waited_s:g} s") from None
    if address_text:
        store.relay = Address(**json.loads(address_text))


def wait_for_all(world: World, timeout_s: float) -> None:
    """Announce this rank. Rank 0 waits for all ranks; if some are missing it raises a TimeoutError that names them."""
    this_address, rank_0 = world.store.addresses()
    if world.info.local_rank == 0 and not network_interface.is_loopback(this_address):
        world.store.set(REACHED, rank_0)
    world.store.set(f"here/{world.rank}", world.info.node)
    if world.rank:
        return
    keys = [f"here/{rank}" for rank in range(1, world.size)]
    try:
        world.store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        nodes = world.store.exchange("here/0", world.info.node.encode(), keys)
        names = ", ".join(world.describe(rank) for rank, node in enumerate(nodes, 1) if node is None)
        raise TimeoutError(f"verb 'join': after {timeout_s:g} s (cluster.timeouts.join) no message from {names}") from None


def carriers(device: torch.device) -> str:
    """Return the backends for ranks with this kind of device: gloo for host tensors, NCCL for GPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def join(world: World) -> None:
    """Form the spanning world and its groups, then make this rank's own group torch's default. Call it after `wait_for_all`.

    From here on this process authenticates each gloo group when it is made (`store/gloo.py`).

    Large worlds connect lazily: gloo connects two ranks at their first message. Otherwise each rank writes an address for every
    other rank and reads all addresses, so the store's traffic grows with the cube of the ranks (3 MB for 64 ranks) and every
    pair is connected. With lazy connections the first send of a pair waits for its receiver, which must not happen inside a
    refit. Worlds that refit over gloo therefore connect all ranks here. `_connect_to_rank_0` connects and authenticates every
    rank with rank 0. Other pairs stay unauthenticated: over gloo they send each other only bodies of RPC messages, which have
    digests.
    """
    _choose_interface(world)
    if world.component == "environment":
        return
    # For groups that libraries make without a timeout, such as FSDP's mesh and vLLM's: torch's 10 minutes would end a rank
    # before the watchdog has named the missing one.
    distributed_c10d.default_pg_timeout = NEVER
    distributed_c10d.default_pg_nccl_timeout = NEVER  # pyright: ignore[reportPrivateImportUsage]  # torch reads it there
    workers, device = world.workers, world.device
    backend = carriers(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"  # gloo then reads all addresses in one request
    authenticator = GlooAuthenticator(world.store, world.rank, world.describe, world.phase)
    if world.size >= RELAYED_FROM and world.carrier.type == "cuda":
        user_setting = os.environ.get(LAZY)
        os.environ[LAZY] = "1"  # for these two groups only: libraries may send in an order that blocks
        _make_spanning(world)
        if user_setting is None:
            del os.environ[LAZY]
        _connect_to_rank_0(world, authenticator)
        authenticator.install()
    else:
        authenticator.install()
        _make_spanning(world)
    groups = (workers.train, *workers.engines, workers.reward, *workers.judge_engines)
    for members in filter(None, groups):  # every rank makes every group, in the same order
        group = dist.new_group(members, backend=backend, timeout=NEVER)
        if world.rank in members:
            assert isinstance(group, dist.ProcessGroup)
            world.own = group
    dist.group.WORLD = world.own


def _make_spanning(world: World) -> None:
    """Make the groups of ranks of several components."""
    backend = "gloo" if world.workers.colocated else carriers(world.device)
    store = PrefixStore("world", world.store)
    size = world.size - len(world.workers.environment)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=size, timeout=NEVER)
    assert dist.group.WORLD is not None
    world.spanning = dist.group.WORLD
    if world.workers.generate and world.workers.train:
        group = dist.new_group((0, *world.workers.generate), backend=backend, timeout=NEVER)
        world.refit = group if isinstance(group, dist.ProcessGroup) else None


def connect(world: World, broadcasts: bool = False) -> None:
    """Make the spanning group's communicator. All its ranks call this after `join`, when the nodes have passed their checks.

    broadcasts: policy.generation.refit_transport is broadcast.

    NCCL makes a communicator at a group's first use, and waits for all ranks, forever if their NCCL versions differ. A refit
    cannot be this first use: reward and judge ranks take part in none, and other ranks may have no messages in its first round.
    """
    if world.component == "environment":
        return
    with world.phase("connect all ranks", verb="join"):  # bounded by cluster.timeouts.join
        dist.all_reduce(torch.zeros(1, device=world.carrier), group=world.spanning)
        if not broadcasts:
            _open_paths(world)
        elif world.refit:
            dist.broadcast(torch.zeros(1, device=world.carrier), src=0, group=world.refit)


def _open_paths(world: World) -> None:
    """Exchange a number with each rank to or from which a planned refit may move weights.

    NCCL allocates a path's buffers at its first message. The first refit is too late for this, since vLLM has filled the GPU by
    then. If the buffers exist before vLLM starts, vLLM takes them into account, and refuses a share of the memory that is not
    free (vllm/v1/worker/utils.py, request_memory).

    Paths between engines are not opened. A refit uses at most two of them for each rank, and only its plan knows which.
    """
    sends = world.component == "train"
    operation = dist.isend if sends else dist.irecv
    tensors = {peer: torch.zeros(1, device=world.carrier) for peer in _refit_peers(world)}
    batch = [dist.P2POp(operation, tensor, peer, world.spanning) for peer, tensor in tensors.items()]
    for work in dist.batch_isend_irecv(batch) if batch else []:
        work.wait()


def _refit_peers(world: World) -> list[int]:
    """Return the ranks with which this rank may exchange weights over NCCL; [] in a world with too many pairs."""
    workers = world.workers
    peers = {"train": workers.generate, "generate": workers.train}.get(world.component, ())
    if workers.colocated or len(workers.train) * len(workers.generate) > MOST_PATHS:  # ranks that share GPUs use gloo
        return []
    return list(peers)


def _choose_interface(world: World) -> None:
    """Set gloo's network interface, unless the user has chosen one.

    gloo gets the interface over which this rank reaches rank 0. On rank 0's node that may be loopback; then gloo gets the
    interface at which other nodes reach rank 0. If all ranks are on one node, gloo gets loopback, whatever name they use for
    rank 0.
    """
    set_by_user = network_interface.keep_user_setting()
    this_address, _ = world.store.addresses()
    uses_loopback = network_interface.is_loopback(this_address)
    if world.rank == 0:
        (reached_address,) = world.store.exchange("here/0", world.info.node.encode(), [REACHED])
        is_one_node = len(set(world.nodes().values())) == 1
        address = (reached_address or this_address) if uses_loopback else this_address
        world.store.set(ADDRESS, network_interface.LOOPBACK if is_one_node else address)
    if not set_by_user:
        network_interface.use_interface_of(own_address(world.store))


def own_address(store: RunStore) -> str:
    """Return the IP address at which the other ranks reach this one. Call it after `join`."""
    this_address, shared = store.addresses()[0], store.get(ADDRESS).decode()
    return shared if network_interface.is_loopback(this_address) or network_interface.is_loopback(shared) else this_address


def _connect_to_rank_0(world: World, authenticator: GlooAuthenticator) -> None:
    """Connect and authenticate each rank with rank 0, so that no later send between the two waits for its receiver."""
    linux.raise_open_files()  # rank 0 connects to every rank, others to their component
    store = PrefixStore("star", world.store)
    authenticator.offer(store, world.rank)
    peers = range(1, world.spanning.size()) if world.rank == 0 else [0]
    gloo: Any = world.spanning._get_backend(torch.device("cpu"))  # torch's stub of a backend lacks send and recv
    authenticator.authenticate(gloo, store, peers)


def leave(world: World, timeout_s: float) -> None:
    """End a successful run. Rank 0 leaves last, because the store ends with it. Stop the watchdog before."""
    world.store.set(f"bye/{world.rank}", "")
    if world.rank == 0:
        world.store.wait([f"bye/{rank}" for rank in range(world.size)], timedelta(seconds=timeout_s))
    if relay_process := world.store.relay_process:  # other ranks of this node may still use it
        if relay_process.stdin:
            relay_process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            relay_process.wait(timeout_s)
