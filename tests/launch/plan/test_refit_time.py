"""The refit time of a plan against closed forms: few ranks, round numbers."""

from unittest import mock

import numpy as np
import pytest

from launch.plan import refit_time
from launch.plan.refit import broadcast_seconds
from launch.plan.refit_time import RefitPrice, loads, merge
from pipeline.boxes import Box, Region
from pipeline.config.cluster import NetworkConfig
from pipeline.refit.plan import schedule
from pipeline.refit.tables import layout_table

GB = 10**9
FREE_COPIES = 1e9  # GB/s


def network(nic=50.0, node=450.0, latency_us=0.0, memory=FREE_COPIES):
    """Return (the section of the recipe, the assumptions of plans)."""
    assumed = {"LATENCY_US": latency_us, "COPIES_GB_PER_S": memory}
    return NetworkConfig(nic_gb_per_s=nic, node_gb_per_s=node), assumed


def messages(*rows):
    """Return messages of rows (round, source, target, bytes), or with True at the end for a relay."""
    columns = list(zip(*((*row, False)[:5] for row in rows), strict=True))
    return merge(*(np.array(column) for column in columns))


def apart(ranks):
    """Return a node for each rank."""
    return np.arange(ranks)


def priced(sent, nodes, described) -> RefitPrice:
    section, assumed = described
    with mock.patch.multiple(refit_time, **assumed):
        return refit_time.price(loads(sent, np.array(nodes)), section)


def price(rows, nodes, described) -> RefitPrice:
    return priced(messages(*rows), nodes, described)


TO_ONE = [(r, s, 2, GB) for r in range(4) for s in (0, 1)]
CLOSED_FORMS = {  # rows, nodes, network, seconds, what limits them
    "a message takes latency, and bytes over bandwidth": (
        [(0, 0, 1, GB)],
        apart(2),
        network(latency_us=20),
        20e-6 + 1 / 50,
        "NIC out",
    ),
    "a receiver's NIC takes from both": (TO_ONE, apart(3), network(nic=25), 4 * 2 / 25, "NIC in"),
    "a sender of two is bound by its own NIC": (
        [(r, 0, t, GB) for r in range(3) for t in (1, 2)],
        apart(3),
        network(),
        3 * 2 / 50,
        "NIC out",
    ),
    "NIC and node work side by side": ([(0, 0, 1, GB), (0, 0, 2, GB)], [0, 0, 1], network(node=25), 1 / 25, "node"),
    "slow copies hide the wire": ([(r, 0, 1, GB) for r in range(10)], apart(2), network(memory=10), 10 / 10, "copies"),
    "every message pays its latency": (
        [(0, s, 4, 1) for s in range(4)],
        apart(5),
        network(latency_us=20),
        4 * 20e-6,
        "latency",
    ),
    "a relay packs what has arrived": (
        [(0, 0, 1, GB), (1, 1, 2, GB, True)],
        [0, 1, 1],
        network(nic=100, node=50, memory=1000),
        1 / 50 + 1 / 1000,
        "node",
    ),
}


@pytest.mark.parametrize("case", CLOSED_FORMS)
def test_closed_forms(case):
    rows, nodes, described, seconds, limit = CLOSED_FORMS[case]
    priced = price(rows, nodes, described)
    assert (priced.seconds, priced.limit) == (pytest.approx(seconds, rel=2e-6), limit)


def test_sharing_within_a_node_halves_incoming_nic_traffic():
    """Ranks 2 and 3 of one node need the same data: each receives half of it from another node, and sends it to the other."""
    alone = [(r, s, s + 2, GB) for r in range(8) for s in (0, 1)]
    heads = [(r, s, s + 2, GB) for r in range(4) for s in (0, 1)]
    passed = [(r + 1, s + 2, 3 - s, GB, True) for r, s, *_ in heads]
    nodes = [0, 1, 2, 2]
    split = loads(messages(*heads, *passed), np.array(nodes))
    whole = loads(messages(*alone), np.array(nodes))
    assert (split.received == whole.received).all()
    assert (2 * split.nic_in == whole.nic_in).all()
    shared, unshared = (price(rows, nodes, network(node=1e6)) for rows in ([*heads, *passed], alone))
    assert shared.seconds == pytest.approx(unshared.seconds / 2, rel=1e-3)


def test_items_of_one_round_and_pair_are_one_message():
    merged = messages((1, 0, 3, 5), (0, 0, 3, 1), (1, 0, 3, 7), (1, 2, 3, 9))
    assert merged.round.tolist() == [0, 1, 1]
    assert merged.source.tolist() == [0, 0, 2]
    assert merged.size.tolist() == [1, 12, 9]


def test_a_broadcast_takes_all_bytes_over_the_root_s_nics():
    described = NetworkConfig(nic_gb_per_s=50, node_gb_per_s=450)
    assert broadcast_seconds(100 * GB, GB, 4, described) == pytest.approx(100 / 50 + (100 + 3) * 20e-6, rel=1e-6)
    assert broadcast_seconds(100 * GB, GB, 4, described, nics=8) == pytest.approx(100 / 400 + (100 + 3) * 20e-6, rel=1e-6)


# ---- a real plan --------------------------------------------------------------------------------------------------------

SHAPES = {"up": (4096, 1024), "norm": (1024,)}
UP, NORM = 4096 * 1024 * 2, 1024 * 2  # bytes
NODE = np.array([0, 0, 1, 1, 2, 2, 2, 2])


def rows(rank, of, units=None):
    """Return a tensor `up` split by rows over `of` ranks, and `norm` on all."""
    share = 4096 // of
    held = [Region("up", Box((rank * share, 0), (share, 1024)), "", 0, ()), Region("norm", Box((0,), (1024,)), "", 0, ())]
    return layout_table(held, SHAPES, units)


def test_a_plans_messages_give_each_rank_its_weights():
    """Check four train ranks on two nodes, each with a quarter, and two engines of two ranks on one node."""
    train = {rank: rows(rank, 4) for rank in range(4)}
    generate = {4 + 2 * engine + rank: rows(rank, 2, ["mlp", "norm"]) for engine in (0, 1) for rank in (0, 1)}
    nodes = {rank: str(number) for rank, number in enumerate(NODE)}
    planned = schedule(train, generate, [[4, 5], [6, 7]], SHAPES, 2, UP, nodes, NetworkConfig())
    load = loads(refit_time.messages(planned), NODE)
    assert load.received.tolist() == [0] * 4 + [UP / 2 + NORM] * 4
    assert load.nic_in.sum() == UP + 2 * NORM  # both engines share it
    assert (load.relayed > 0).tolist() == [False] * 4 + [True] * 4
