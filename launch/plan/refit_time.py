"""Price the messages of a planned refit on a network: its seconds, what limits them, and a lower bound for any transfer.

Ranks pack, send, receive and apply in rounds, as in `pipeline/refit/transfer.py`. In a round a rank takes
`latency * messages + max(NIC out, NIC in, node out, node in)`, where each argument of max is the bytes on a path over its
bandwidth. This is the alpha-beta model (Hockney 1994, "The communication challenge for MPP") with one port, full duplex, and a
NIC and links within the node that work in parallel. A rank that relays packs what arrived in the round before, so its packing
adds to the round. Other copies overlap with the network, but for the first that is packed and the last that is applied.

A round lasts as long as its slowest rank, whether or not other ranks wait for it. Not counted: congestion inside the fabric
(full bisection is assumed), the digest, a unit's `finish`, and the pause of generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.config.cluster import COPIES_GB_PER_S, LATENCY_US, NetworkConfig
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


@dataclass(frozen=True)
class RefitPrice:
    """The seconds of a refit: of every rank in every round, and of the rounds."""

    loads: Loads
    parts: dict[str, np.ndarray]  # term of TERMS -> [rounds, ranks] seconds

    @cached_property
    def wire(self) -> np.ndarray:
        """The seconds of each rank's messages, [rounds, ranks]."""
        return self.parts["latency"] + np.maximum.reduce([self.parts[path] for path in ("wire out", "wire in", "node")])

    @cached_property
    def rounds(self) -> np.ndarray:
        """The seconds of each round, [rounds]: of its slowest rank, whose copies or messages may take longer."""
        relayed = self.parts["pack"] * self.loads.relays
        return np.maximum(self.wire + relayed, self.parts["pack"] + self.parts["apply"]).max(1)

    @property
    def starts(self) -> np.ndarray:
        """The seconds from the start of the refit to the start of each round, [rounds]."""
        return self.parts["pack"][0].max() + np.cumsum(self.rounds) - self.rounds

    @property
    def seconds(self) -> float:
        """The seconds of the refit, without the pause of generation."""
        if not len(self.rounds):
            return 0.0
        return float(self.parts["pack"][0].max() + self.rounds.sum() + self.parts["apply"][-1].max())

    def limits(self) -> dict[str, float]:
        """Return term of TERMS -> its seconds on the ranks that set the rounds. They add up to `seconds`."""
        spent = dict.fromkeys(TERMS, 0.0)
        relayed, copies = self.parts["pack"] * self.loads.relays, self.parts["pack"] + self.parts["apply"]
        for number, rank in enumerate(np.maximum(self.wire + relayed, copies).argmax(1)):
            parts = {term: float(part[number, rank]) for term, part in self.parts.items()}
            path = max(("wire out", "wire in", "node"), key=parts.__getitem__)
            if self.wire[number, rank] + relayed[number, rank] >= copies[number, rank]:
                parts = {"latency": parts["latency"], path: parts[path], "pack": float(relayed[number, rank])}
            else:
                parts = {term: parts[term] for term in ("pack", "apply")}
            for term, seconds in parts.items():
                spent[term] += seconds
        if len(self.rounds):
            spent["pack"] += float(self.parts["pack"][0].max())
            spent["apply"] += float(self.parts["apply"][-1].max())
        return spent


def price(loads: Loads, network: NetworkConfig) -> RefitPrice:
    """Return the price of a transfer with these loads."""
    nic, node, memory = (GIGA * rate for rate in (network.nic_gb_per_s, network.node_gb_per_s, COPIES_GB_PER_S))
    parts = {
        "pack": loads.sent / memory,
        "wire out": loads.nic_out / nic,
        "wire in": loads.nic_in / nic,
        "node": np.maximum(loads.node_out, loads.node_in) / node,
        "latency": np.maximum(loads.sends, loads.receives) * (LATENCY_US / 1e6),
        "apply": loads.received / memory,
    }
    return RefitPrice(loads, parts)


def floor(schedule: RefitSchedule, node: np.ndarray, network: NetworkConfig) -> tuple[float, str]:
    """Return (lower bound of the seconds of any transfer without latencies and copies, name of the limit that sets it).

    node: [ranks], the number of each rank's node. Boxes that overlap but are not equal count twice. There are three limits.
    train egress: every needed byte leaves a train rank through its NIC or, if generate ranks are on its node, over the links
    within the node. rank ingress: a generate rank's weights enter through its NIC and over the links within its node. node
    ingress, if no train rank is on the node: the bytes that a generate node needs enter once through its NICs.
    """
    nic, links = GIGA * network.nic_gb_per_s, GIGA * network.node_gb_per_s
    needed, size = schedule.needed, schedule.needed.boxes.numel * schedule.width[schedule.needed.boxes.tensor]
    of_rank = np.bincount(needed.receiver, size[needed.box], schedule.engines.shape[1])
    members: dict[int, set[int]] = {}  # node -> the numbers in an engine of its ranks
    for rank, (_, member) in schedule.member.items():
        members.setdefault(int(node[rank]), set()).add(member)
    near = int(np.bincount(node[schedule.engines.ravel()]).max())  # generate ranks of a node
    shared = not members.keys().isdisjoint(node[list(schedule.held.rows)].tolist())
    limits = {
        "train egress": size.sum() / (len(schedule.held.rows) * (nic + links * shared)),
        "rank ingress": of_rank.max(initial=0) / (nic + links * (shared or near > 1)),
    }
    if not shared:
        boxes = (np.unique(needed.box[np.isin(needed.receiver, list(held))]) for held in set(map(frozenset, members.values())))
        limits["node ingress"] = max(size[box].sum() for box in boxes) / (near * nic)
    name = max(limits, key=limits.__getitem__)
    return float(limits[name]), name
