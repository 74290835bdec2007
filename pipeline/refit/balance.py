"""Choose which train rank sends what: all ranks that hold a box share its sending, so that the largest load is minimal.

Given the bytes that each holder set (the ranks that hold the same boxes) must send, `send_shares` finds how many bytes each of
its ranks sends. The loads have the least sum of squares, which also minimises the largest. `lower_bound` proves it: the ranks
of the largest load hold boxes that no other rank holds, and those alone amount to this many bytes a rank.

`sharing_groups` joins engines into sharing groups: one member receives a box from the train ranks, and the members pass it on
among themselves.
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

    sets: the ranks of each set, as numbers below `ranks`. demand: [sets] bytes. The sets take turns, those with the fewest
    ranks first; each levels its load above the load of the other sets: coordinate descent on a convex sum of squares.
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
    """Return the common level that pouring `amount` over `loads` reaches."""
    heights = np.sort(loads)
    poured = heights * np.arange(1, len(heights) + 1) - np.cumsum(heights)  # amount to reach each height
    wet = int(np.searchsorted(poured, amount, "right"))
    return (heights[:wet].sum() + amount) / wet


def lower_bound(sets: Sequence[np.ndarray], demand: np.ndarray, load: np.ndarray) -> float:
    """Return bytes that a train rank must send under any plan: the mean, over a set of ranks, of what only these ranks hold.

    It examines two sets of ranks: all ranks, and the ranks with the largest load.
    """
    top = load >= load.max(initial=0.0) * (1 - 10 * _SETTLED)
    alone = sum(bytes_ for members, bytes_ in zip(sets, demand, strict=True) if top[members].all())
    return max(float(demand.sum()) / len(load), float(alone) / max(int(top.sum()), 1))


def sharing_groups(
    engines: Sequence[Sequence[int]], nodes: Mapping[int, str], network: NetworkConfig, send_bytes: float, receive_bytes: float
) -> list[list[int]]:
    """Return the sharing groups, as numbers of engines, in the order of their ring.

    send_bytes: what the busiest train rank sends for one engine. receive_bytes: what the busiest generate rank receives.
    Engines whose ranks share nodes are joined if the network within a node is faster. Across nodes, engines are joined only
    until receiving by the generate ranks, not sending by the train ranks, is the bottleneck.
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
