"""Price the messages of a planned refit on a network: its seconds, and what limits them.

The NIC and the links within the node of every rank work in parallel and in both directions. A refit takes the time of the bytes
on its busiest path, one latency for each message of a round, and the copies of relayed bytes, which ranks pack after they
arrive. Not counted: ranks that wait for each other in a round, congestion inside the fabric (full bisection is assumed), the
digest, and the pause of generation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from launch.plan.rank_division import GIGA
from pipeline.config.cluster import COPIES_GB_PER_S, LATENCY_US, NetworkConfig
from pipeline.refit.intersection import changes
from pipeline.refit.schedule import RefitSchedule


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
    """Bytes of each rank on each path, [ranks] float64."""

    nic_out: np.ndarray
    nic_in: np.ndarray
    node_out: np.ndarray
    node_in: np.ndarray
    relayed: np.ndarray  # of what it sends
    messages: np.ndarray  # number that it sends or receives, whichever is more

    @property
    def sent(self) -> np.ndarray:
        """Return the bytes that each rank sends, [ranks]."""
        return self.nic_out + self.node_out

    @property
    def received(self) -> np.ndarray:
        """Return the bytes that each rank receives, [ranks]."""
        return self.nic_in + self.node_in


def loads(messages: Messages, node: np.ndarray) -> Loads:
    """Return the loads of all ranks. node: [ranks], the number of each rank's node."""
    far = node[messages.source] != node[messages.target]

    def total(end: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.bincount(end, weight, len(node))

    ones = np.ones(len(messages))
    return Loads(
        nic_out=total(messages.source, messages.size * far),
        nic_in=total(messages.target, messages.size * far),
        node_out=total(messages.source, messages.size * ~far),
        node_in=total(messages.target, messages.size * ~far),
        relayed=total(messages.source, messages.size * messages.relay),
        messages=np.maximum(total(messages.source, ones), total(messages.target, ones)),
    )


@dataclass(frozen=True, slots=True)
class RefitPrice:
    """The seconds of a refit without the pause of generation, and what limits them."""

    loads: Loads
    seconds: float
    limit: str  # the path of the busiest rank, or its latency or copies


def price(loads: Loads, network: NetworkConfig) -> RefitPrice:
    """Return the price of a transfer with these loads."""
    nic, node, memory = (GIGA * rate for rate in (network.nic_gb_per_s, network.node_gb_per_s, COPIES_GB_PER_S))
    paths = {
        "NIC out": loads.nic_out / nic,
        "NIC in": loads.nic_in / nic,
        "node": np.maximum(loads.node_out, loads.node_in) / node,
        "copies": (loads.sent + loads.received) / memory,
    }
    besides = {"latency": loads.messages * (LATENCY_US / 1e6), "relayed copies": loads.relayed / memory}
    of_rank = np.maximum.reduce([*paths.values()]) + sum(besides.values())
    busiest = int(of_rank.argmax())
    spent = {name: float(part[busiest]) for name, part in (paths | besides).items()}
    return RefitPrice(loads, float(of_rank[busiest]), max(spent, key=spent.__getitem__))
