"""Estimate the time of a planned refit on a network: its seconds, what limits them, and a lower bound for any transfer.

A rank's main thread packs and posts the messages of round r, then waits for the messages of round r - 1 and applies them, as in
`pipeline/refit/transfer.py`. Packing and applying therefore share one thread, and at most two rounds are in flight. A rank that
relays waits for round r - 1 before it packs round r.

A round of a rank takes `latency * messages + max(NIC out, NIC in, node out, node in)`, where each argument of max is the bytes
on a path over its bandwidth. This is the alpha-beta model (Hockney 1994, "The communication challenge for MPP") with one port,
full duplex, and a NIC and links within the node that work in parallel. Every message costs the whole latency. LogGP (Alexandrov
et al. 1995) would let the latencies of one rank overlap and count only each message's overhead, so this model is an upper bound
of LogGP. The rounds of a rank are sequential on the wire, like batches on one NCCL communicator.

Ranks wait only for their partners. A rank's round begins when the rank and its partners have posted it and have finished the
previous round. It ends when the rank and its partners have moved all their bytes of the round. This is an upper bound, since a
partner may serve this rank first.

Not counted: congestion inside the fabric (full bisection is assumed), the digest, a unit's `finish`, and the pause of
generation. Therefore the prediction underestimates a whole refit. It overestimates the transfer within it, because it counts a
copy at each end of every message, although some messages need none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.config.cluster import NetworkConfig
from pipeline.refit.intersection import changes
from pipeline.refit.schedule import RefitSchedule

TERMS: tuple[str, ...] = ("pack", "wire out", "wire in", "node", "latency", "apply")
"""Parts of a round's time: packing sent bytes, NIC out, NIC in, links in nodes, messages' latency, applying received bytes."""
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages, one per row, in the order of rounds."""

    round: np.ndarray  # [m] int64
    source: np.ndarray  # [m] int64: global ranks
    target: np.ndarray  # [m] int64
    size: np.ndarray  # [m] int64: bytes
    relay: np.ndarray  # [m] bool: whether the source relays what it received in the previous round

    def __len__(self) -> int:
        return len(self.round)


def merge(round: np.ndarray, source: np.ndarray, target: np.ndarray, size: np.ndarray, relay: np.ndarray) -> Messages:
    """Return messages, in each of which all items with the same round, source and target are merged. size: bytes of an item."""
    ranks = int(max(source.max(initial=0), target.max(initial=0))) + 1
    route = (round.astype(np.int64) * ranks + source) * ranks + target
    order = np.argsort(route, kind="stable")
    route = route[order]
    first = np.flatnonzero(changes(route))
    pair, target = np.divmod(route[first], ranks)
    round, source = np.divmod(pair, ranks)
    total, relays = (np.add.reduceat(column[order], first) if len(first) else column for column in (size, relay))
    return Messages(round, source, target, total.astype(np.int64), relays > 0)


def messages(schedule: RefitSchedule) -> Messages:
    """Return all messages of a schedule, from train ranks and from relays."""
    from_train, from_relays = schedule.train_messages(), schedule.forwarded_messages()
    names = ("round", "source", "target", "bytes")
    round, source, target, size = (np.concatenate([getattr(from_train, name), getattr(from_relays, name)]) for name in names)
    return merge(round, source, target, size, np.repeat([False, True], [len(from_train.round), len(from_relays.round)]))


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes on each path and numbers of messages, for every round and rank, [rounds, ranks] float64."""

    nic_out: np.ndarray
    nic_in: np.ndarray
    node_out: np.ndarray
    node_in: np.ndarray
    sends: np.ndarray
    receives: np.ndarray
    relays: np.ndarray  # [ranks] bool: whether the rank relays in any round

    @property
    def sent(self) -> np.ndarray:
        """Return the bytes that each rank sends per round, [rounds, ranks]."""
        return self.nic_out + self.node_out

    @property
    def received(self) -> np.ndarray:
        """Return the bytes that each rank receives per round, [rounds, ranks]."""
        return self.nic_in + self.node_in

    def staging(self, ipc: bool = False) -> np.ndarray:
        """Return the bytes that each rank stages, [ranks]: twice its largest round, in each direction.

        A rank that relays stages one round of sends, since it packs a round just before posting (`pipeline/refit/planned.py`).
        ipc: whether ranks use CUDA IPC. Then a receiver reads messages of its own node from the sender's staging, and a sender
        stages two rounds even if it relays (`pipeline/refit/shared_memory.py`).
        """
        if ipc:
            return 2 * (self.sent.max(0, initial=0) + self.nic_in.max(0, initial=0))
        return self.sent.max(0, initial=0) * np.where(self.relays, 1, 2) + 2 * self.received.max(0, initial=0)


def loads(messages: Messages, node: np.ndarray) -> Loads:
    """Return the loads of all rounds and ranks. node: [ranks], the number of each rank's node."""
    ranks, rounds = len(node), int(messages.round.max(initial=-1)) + 1
    far = node[messages.source] != node[messages.target]

    def total(end: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.bincount(messages.round * ranks + end, weight, rounds * ranks).reshape(rounds, ranks)

    ones = np.ones(len(messages))
    return Loads(
        nic_out=total(messages.source, messages.size * far),
        nic_in=total(messages.target, messages.size * far),
        node_out=total(messages.source, messages.size * ~far),
        node_in=total(messages.target, messages.size * ~far),
        sends=total(messages.source, ones),
        receives=total(messages.target, ones),
        relays=np.bincount(messages.source, messages.relay, ranks) > 0,
    )


@dataclass(frozen=True, slots=True)
class RefitSimulation:
    """A simulated refit: the seconds from its start to each event, [rounds, ranks], and the durations of its parts."""

    messages: Messages
    loads: Loads
    parts: dict[str, np.ndarray]  # by TERMS
    posted: np.ndarray  # the round is packed and posted
    begun: np.ndarray  # the rank and its partners have posted the round
    moved: np.ndarray  # this rank's bytes of the round have moved
    arrived: np.ndarray  # its partners' bytes have moved, too
    applied: np.ndarray

    @property
    def seconds(self) -> float:
        """Return the seconds until the last rank has applied its last round."""
        return float(self.applied.max(initial=0.0))


def simulate(messages: Messages, node: np.ndarray, network: NetworkConfig) -> RefitSimulation:
    """Simulate the messages of a schedule by this module's time model. node: [ranks], the number of each rank's node."""
    load = loads(messages, node)
    rounds, ranks = load.sends.shape
    parts = _parts(load, network)
    wire = parts["latency"] + np.maximum.reduce([parts["wire out"], parts["wire in"], parts["node"]])
    posted, begun, moved, arrived, applied = (np.zeros((rounds, ranks)) for _ in range(5))
    starts = np.searchsorted(messages.round, np.arange(rounds + 1))
    never = np.zeros(ranks)
    for r in range(rounds):
        source, target = messages.source[starts[r] : starts[r + 1]], messages.target[starts[r] : starts[r + 1]]
        free = applied[r - 2] if r > 1 else (posted[0] if r else never)  # the main thread
        on_wire = arrived[r - 1] if r else never
        posted[r] = np.where(load.relays, np.maximum(free, on_wire), free) + parts["pack"][r]  # a relay must have arrived
        begun[r] = _with_partners(np.maximum(posted[r], on_wire), source, target)
        moved[r] = begun[r] + wire[r]
        arrived[r] = _with_partners(moved[r], source, target)
        if r:
            applied[r - 1] = np.maximum(posted[r], arrived[r - 1]) + parts["apply"][r - 1]
    if rounds:
        previous_end = applied[rounds - 2] if rounds > 1 else never
        applied[-1] = np.maximum(previous_end, arrived[-1]) + parts["apply"][-1]
    return RefitSimulation(messages, load, parts, posted, begun, moved, arrived, applied)


def _parts(load: Loads, network: NetworkConfig) -> dict[str, np.ndarray]:
    """Return term of TERMS -> seconds of every round and rank, [rounds, ranks]."""
    nic, node, memory = (GIGA * rate for rate in (network.nic_gb_per_s, network.node_gb_per_s, network.memory_gb_per_s))
    return {
        "pack": load.sent / memory,
        "wire out": load.nic_out / nic,
        "wire in": load.nic_in / nic,
        "node": np.maximum(load.node_out, load.node_in) / node,
        "latency": np.maximum(load.sends, load.receives) * (network.latency_us / 1e6),
        "apply": load.received / memory,
    }


def _with_partners(amount: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return, for each rank, the latest of its own time and of its partners' times.

    amount: [ranks], the time of each rank. source, target: the ranks of each message of a round, which are partners.
    """
    latest = amount.copy()
    np.maximum.at(latest, source, amount[target])
    np.maximum.at(latest, target, amount[source])
    return latest


# ---- what bounds it -----------------------------------------------------------------------------------------------------


def bounds(simulation: RefitSimulation) -> dict[str, float]:
    """Return term of TERMS -> its seconds on the critical path. They add up to the duration of the refit."""
    spent: dict[str, float] = dict.fromkeys(TERMS, 0.0)
    if not simulation.applied.size:
        return spent
    last, rank = divmod(int(simulation.applied.argmax()), simulation.applied.shape[1])
    event, r = "applied", last
    while r >= 0 and event != "start":
        event, r, rank = _STEPS[event](simulation, r, rank, spent)
    return spent


def _before_applied(simulation: RefitSimulation, r: int, rank: int, spent: dict[str, float]) -> tuple[str, int, int]:
    spent["apply"] += float(simulation.parts["apply"][r, rank])
    rounds = len(simulation.posted)
    if r + 1 < rounds and simulation.posted[r + 1, rank] > simulation.arrived[r, rank]:
        return "posted", r + 1, rank
    if r + 1 == rounds and r and simulation.applied[r - 1, rank] > simulation.arrived[r, rank]:
        return "applied", r - 1, rank
    return "arrived", r, rank


def _before_posted(simulation: RefitSimulation, r: int, rank: int, spent: dict[str, float]) -> tuple[str, int, int]:
    spent["pack"] += float(simulation.parts["pack"][r, rank])
    if r == 0:
        return "start", 0, rank
    free = simulation.applied[r - 2, rank] if r > 1 else simulation.posted[0, rank]
    if simulation.loads.relays[rank] and simulation.arrived[r - 1, rank] > free:
        return "arrived", r - 1, rank
    return ("applied", r - 2, rank) if r > 1 else ("posted", 0, rank)


def _before_arrived(simulation: RefitSimulation, r: int, rank: int, spent: dict[str, float]) -> tuple[str, int, int]:
    slowest = _latest(simulation, r, rank, simulation.moved[r])
    path = max(("wire out", "wire in", "node"), key=lambda name: simulation.parts[name][r, slowest])
    for name in ("latency", path):
        spent[name] += float(simulation.parts[name][r, slowest])
    ready_times = simulation.posted[r] if r == 0 else np.maximum(simulation.posted[r], simulation.arrived[r - 1])
    waited_for = _latest(simulation, r, slowest, ready_times)
    if r and simulation.arrived[r - 1, waited_for] > simulation.posted[r, waited_for]:
        return "arrived", r - 1, waited_for
    return "posted", r, waited_for


_STEPS = {"applied": _before_applied, "posted": _before_posted, "arrived": _before_arrived}


def _latest(simulation: RefitSimulation, r: int, rank: int, times: np.ndarray) -> int:
    """Return the rank with the latest time among `rank` and its partners in round `r`. times: [ranks]."""
    start, stop = np.searchsorted(simulation.messages.round, (r, r + 1))
    source, target = simulation.messages.source[start:stop], simulation.messages.target[start:stop]
    members = np.concatenate([[rank], target[source == rank], source[target == rank]])
    return int(members[times[members].argmax()])


# ---- floors, and the reference ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that every possible schedule moves. Each distinct byte counts once."""

    owned: np.ndarray  # [generate ranks]: bytes of each rank's weights
    by_node: np.ndarray  # [generate nodes]: bytes that any rank of the node needs and no train rank there holds
    total: int  # bytes that any rank needs
    train_ranks: int
    ranks_per_node: int  # of generate nodes
    shared: bool = False  # whether train ranks are on generate nodes


def demand(schedule: RefitSchedule, node: np.ndarray) -> Demand:
    """Return the demand of a schedule. node: [ranks], the number of each rank's node.

    Boxes that overlap but are not equal count twice.
    """
    needed_boxes, size = schedule.needed, schedule.needed.boxes.numel * schedule.width[schedule.needed.boxes.tensor]
    owned = np.bincount(needed_boxes.receiver, size[needed_boxes.box], schedule.engines.shape[1])
    inside: dict[int, set[int]] = {}  # the ranks in the engine that a node has, of whichever engine
    for rank, (_, member) in schedule.member.items():
        inside.setdefault(int(node[rank]), set()).add(member)
    distinct = {
        engine_members: np.unique(needed_boxes.box[np.isin(needed_boxes.receiver, engine_members)])
        for engine_members in {tuple(sorted(p)) for p in inside.values()}
    }
    by_node = np.array([size[distinct[tuple(sorted(engine_members))]].sum() for engine_members in inside.values()])
    shared = bool(set(node[list(schedule.held.rows)].tolist()) & inside.keys())
    if shared:
        box, holders, held_bytes = _bytes_by_set(schedule)
        for i, (number, engine_members) in enumerate(inside.items()):
            sets_on_node = np.array([(node[members] == number).any() for members in schedule.held.sets])
            by_node[i] -= held_bytes[sets_on_node[holders] & np.isin(box, distinct[tuple(sorted(engine_members))])].sum()
    return Demand(
        owned=np.tile(owned, len(schedule.engines)),
        by_node=by_node,
        total=int(size.sum()),
        train_ranks=len(schedule.held.rows),
        ranks_per_node=int(np.bincount(node[schedule.engines.ravel()]).max()),
        shared=shared,
    )


def _bytes_by_set(schedule: RefitSchedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays, [pairs]: a needed box, a set of train ranks, and the bytes of the box that this set holds."""
    pieces, sets = schedule.pieces, len(schedule.held.sets)
    size = pieces.numel * schedule.width[schedule.needed.boxes.tensor[pieces.needed_box]]
    pair = pieces.needed_box.astype(np.int64) * sets + schedule.held.holders[pieces.held_box]
    pairs, pair_index = np.unique(pair, return_inverse=True)
    return pairs // sets, pairs % sets, np.bincount(pair_index, size, len(pairs)).astype(np.int64)


def floor(demand: Demand, network: NetworkConfig) -> tuple[float, str]:
    """Return (lower bound of the seconds of any transfer without latencies and copies, name of the limit that sets it).

    There are three limits. train egress: every needed byte leaves a train rank through its NIC or, if generate ranks are on its
    node, over the links within the node. node ingress: the bytes that a generate node needs and does not hold enter once
    through its NICs. rank ingress: a generate rank's weights enter through its NIC and over the links within its node.
    """
    nic, node = GIGA * network.nic_gb_per_s, GIGA * network.node_gb_per_s
    alone = demand.ranks_per_node == 1 and not demand.shared
    limits = {
        "train egress": demand.total / (demand.train_ranks * (nic + node if demand.shared else nic)),
        "node ingress": float(demand.by_node.max(initial=0)) / (demand.ranks_per_node * nic),
        "rank ingress": float(demand.owned.max(initial=0)) / (nic if alone else nic + node),
    }
    name = max(limits, key=limits.__getitem__)
    return limits[name], name


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The bytes of a bucketed broadcast, in which rank 0 gathers full tensors and broadcasts them to every generate rank."""

    total: int  # bytes of the model on the wire
    far: int  # bytes that only ranks outside of rank 0's node hold
    near: int  # bytes that rank 0 gathers from other ranks of its node
    owned: int  # bytes of the generate rank that writes most
    bucket: int  # bytes
    nodes: int  # number of nodes with generate ranks
    nics: int = 1  # NICs of rank 0's node that the broadcast can use: one for each rank of its group there
    gather_nics: int = 1  # NICs that the gather can use


def reference(schedule: RefitSchedule, node: np.ndarray, total: int, bucket: int) -> Broadcast:
    """Return the bytes of a bucketed broadcast, the alternative to the schedule.

    node: [ranks], the number of each rank's node. total: bytes of all full tensors. bucket: bytes of a bucket.
    """
    held_boxes, size = schedule.held, schedule.held.boxes.numel * schedule.width[schedule.held.boxes.tensor]
    beside = [rows.box for rank, rows in held_boxes.rows.items() if node[rank] == node[0]]
    rank_bytes, near = int(size[np.unique(held_boxes.rows[0].box)].sum()), int(size[np.unique(np.concatenate(beside))].sum())
    return Broadcast(
        total=total,
        far=int(size.sum()) - near,
        near=near - rank_bytes,
        owned=int(demand(schedule, node).owned.max()),
        bucket=bucket,
        nodes=len(np.unique(node[schedule.engines])),
    )


def broadcast_seconds(broadcast: Broadcast, network: NetworkConfig) -> tuple[float, str]:
    """Return (seconds of a bucketed broadcast whose stages overlap fully, name of the slowest stage).

    The broadcast is a ring, as in NCCL: bytes pass through every rank, and all links work in parallel. A bucket takes the time
    of its bytes on the slowest link plus one latency. Buckets follow each other around the ring, so the latency of each node
    counts once.
    """
    nic, node, memory = (GIGA * rate for rate in (network.nic_gb_per_s, network.node_gb_per_s, network.memory_gb_per_s))
    latency = network.latency_us / 1e6
    buckets = max(1, -(-broadcast.total // broadcast.bucket))
    stages = {
        "gather": max(broadcast.far / (broadcast.gather_nics * nic), broadcast.near / node) / buckets,
        "pack": broadcast.total / memory / buckets,
        "broadcast": broadcast.total / min(broadcast.nics * nic, node) / buckets + latency,
        "apply": broadcast.owned / memory / buckets,
    }
    slowest = max(stages, key=stages.__getitem__)
    return sum(stages.values()) + (buckets - 1) * stages[slowest] + (broadcast.nodes - 1) * latency, slowest
