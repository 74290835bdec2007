"""Choose how many bytes each train rank sends: all holders of a box share its sending, so that the largest load is minimal.

A holder set is a set of ranks that hold the same boxes. Given the bytes that each holder set must send, `send_shares` computes
how many of them each rank of the set sends. The loads of the ranks have the least sum of squares; then the largest load is
minimal too. `lower_bound` proves this: the ranks with the largest load hold boxes that no other rank holds, and these boxes
alone amount to that many bytes per rank.

`sharing_groups` joins engines into sharing groups: one engine of a group receives a box from the train ranks, and the engines
of the group pass it on among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config.cluster import NetworkConfig

_SWEEPS = 50  # at most
_SETTLED = 1e-4  # fraction of the largest load; a sweep that changes no load by more ends the search
_WORTH_SHARING = 1.1  # engines share across nodes if sending takes this many times as long as receiving


def send_shares(sets: Sequence[np.ndarray], demand: np.ndarray, ranks: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (bytes that each rank of each set sends, [members] float64; bytes that each rank sends, [ranks] float64).

    sets: the ranks of each set, as numbers below `ranks`. demand: [sets] bytes.

    The algorithm is coordinate descent on the sum of squared loads, which is convex. The sets take turns, those with the fewest
    ranks first. In its turn a set divides its bytes so that the total loads of its ranks become as level as possible.
    """
    load = np.zeros(ranks)
    shares = [np.zeros(len(members)) for members in sets]
    order = np.argsort([len(members) for members in sets], kind="stable")
    for _ in range(_SWEEPS):
        before = load.copy()
        for i in order:
            members = sets[i]
            base = load[members] - shares[i]
            shares[i] = np.maximum(_level(base, float(demand[i])) - base, 0.0)
            load[members] = base + shares[i]
        if np.abs(load - before).max(initial=0.0) <= _SETTLED * load.max(initial=0.0):
            break
    return shares, load


def _level(loads: np.ndarray, amount: float) -> float:
    """Return the common level to which the lowest of `loads` rise if `amount` is added to them in total."""
    heights = np.sort(loads)
    poured = heights * np.arange(1, len(heights) + 1) - np.cumsum(heights)  # amount to reach each height
    wet = int(np.searchsorted(poured, amount, "right"))
    return (heights[:wet].sum() + amount) / wet


def lower_bound(sets: Sequence[np.ndarray], demand: np.ndarray, load: np.ndarray) -> float:
    """Return a lower bound of the largest load of a train rank under any plan, in bytes.

    For any set of ranks, such a bound is the bytes that only these ranks can send, divided by their number. The result is the
    larger bound of two sets: all ranks, and the ranks with the largest load.
    """
    top = load >= load.max(initial=0.0) * (1 - 10 * _SETTLED)
    alone = sum(bytes_ for members, bytes_ in zip(sets, demand, strict=True) if top[members].all())
    return max(float(demand.sum()) / len(load), float(alone) / max(int(top.sum()), 1))


def sharing_groups(
    engines: Sequence[Sequence[int]], nodes: Mapping[int, str], network: NetworkConfig, send_bytes: float, receive_bytes: float
) -> list[list[int]]:
    """Return the sharing groups: for each group, the indices of its engines in the order of its ring.

    send_bytes: bytes that the busiest train rank sends for one engine. receive_bytes: bytes that the busiest generate rank
    receives.

    Engines whose ranks share nodes are joined if the network within a node is faster than between nodes. Across nodes, engines
    are joined only until the bottleneck is the generate ranks' receiving, and no longer the train ranks' sending.
    """
    by_nodes: dict[object, list[int]] = {}
    faster = network.node_gb_per_s > network.nic_gb_per_s
    for number, engine in enumerate(engines):
        by_nodes.setdefault(tuple(nodes[rank] for rank in engine) if faster else number, []).append(number)
    clusters = list(by_nodes.values())
    count = len(clusters)
    if count * send_bytes > receive_bytes * _WORTH_SHARING:
        count = max(1, math.floor(receive_bytes * _WORTH_SHARING / send_bytes))
    return [[engine for i in part for engine in clusters[i]] for part in np.array_split(np.arange(len(clusters)), count)]
