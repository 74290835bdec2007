"""Which train rank sends what: all ranks that hold a box share its sending, such that no rank sends more than it must.

Given the bytes that must come from each holder set (the ranks that hold the same boxes), `send_shares` finds how many each
of its ranks sends. The loads have the least sum of squares, which makes the largest as small as it can be. `lower_bound` proves
it: the ranks of the largest load hold boxes that no other rank holds, and those alone come to this many bytes a rank.

`sharing_groups` joins engines into sharing groups: one member gets a box from the train ranks, the others get it from
each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.config.cluster import NetworkConfig

_SWEEPS = 50
_SETTLED = 1e-4  # of the largest load: a sweep that changes none by more ends the search
_WORTH_SHARING = 1.1  # so much longer train ranks must take than generate ranks, for engines to share across nodes


def send_shares(sets: Sequence[np.ndarray], demand: np.ndarray, ranks: int) -> tuple[list[np.ndarray], np.ndarray]:
    """(for each set, the bytes that each of its ranks sends [members] float64; all that each rank sends [ranks] float64).

    sets: of each, its ranks as numbers below `ranks`. demand: [sets] bytes. Sets are levelled in turns, those with the
    fewest ranks first, each over what the others put on its ranks: coordinate descent on a convex sum of squares.
    """
    load = np.zeros(ranks)
    found = [np.zeros(len(members)) for members in sets]
    order = np.argsort([len(members) for members in sets], kind="stable")
    for _ in range(_SWEEPS):
        before = load.copy()
        for i in order:
            members = sets[i]
            others = load[members] - found[i]
            found[i] = np.maximum(_level(others, demand[i]) - others, 0.0)
            load[members] = others + found[i]
        if np.abs(load - before).max(initial=0.0) <= _SETTLED * load.max(initial=0.0):
            break
    return found, load


def _level(loads: np.ndarray, amount: float) -> float:
    """The height that water reaches when `amount` is poured over `loads`."""
    heights = np.sort(loads)
    poured = heights * np.arange(1, len(heights) + 1) - np.cumsum(heights)  # to reach each height
    wet = int(np.searchsorted(poured, amount, "right"))
    return (heights[:wet].sum() + amount) / wet


def lower_bound(sets: Sequence[np.ndarray], demand: np.ndarray, load: np.ndarray) -> float:
    """Bytes that some train rank must send, whatever the plan: the mean over any ranks of what they alone hold. Two sets of
    ranks are looked at: all, and those of the largest load."""
    top = load >= load.max(initial=0.0) * (1 - 10 * _SETTLED)
    alone = sum(bytes_ for members, bytes_ in zip(sets, demand, strict=True) if top[members].all())
    return max(float(demand.sum()) / len(load), float(alone) / max(int(top.sum()), 1))


def sharing_groups(
    engines: Sequence[Sequence[int]], nodes: Mapping[int, str], network: NetworkConfig, sent: float, received: float
) -> list[list[int]]:
    """Sharing groups, as numbers of engines, in the order of their ring.

    sent: bytes that the busiest train rank sends for one engine; received: that a generate rank receives at most. Engines whose
    ranks share nodes are joined where the network within a node is the faster one; across nodes as few as let the generate
    ranks' receiving, not the train ranks' sending, set the time.
    """
    places: dict[object, list[int]] = {}
    faster = network.node_gb_per_s > network.nic_gb_per_s
    for number, engine in enumerate(engines):
        places.setdefault(tuple(nodes[rank] for rank in engine) if faster else number, []).append(number)
    joined = list(places.values())
    count = len(joined)
    if count * sent > received * _WORTH_SHARING:
        count = max(1, math.floor(received * _WORTH_SHARING / sent))
    return [[engine for i in part for engine in joined[i]] for part in np.array_split(np.arange(len(joined)), count)]
