"""Plans for train and generate ranks that are on the same nodes."""

from __future__ import annotations

import pytest

from launch.plan import refit_time
from pipeline.boxes import Box, Region
from pipeline.config.cluster import NetworkConfig
from pipeline.refit.plan import schedule
from pipeline.refit.tables import LayoutTable, layout_table


@pytest.mark.parametrize(
    ("nodes", "per_node", "tensor", "size"),
    [(2, 4, 1, 1), (4, 8, 8, 8), (2, 8, 4, 2), (3, 4, 2, 4), (2, 2, 2, 1), (1, 8, 2, 4), (4, 1, 1, 1)],
)
def test_no_byte_leaves_a_node_that_holds_all_of_the_model(nodes, per_node, tensor, size):
    """Place train and generate ranks on the same nodes. tensor: train ranks that shard a replica; size: of an engine."""
    shapes = {f"t{i}": (16, 1024) for i in range(32)}

    def part(k: int, of: int, units: bool) -> LayoutTable:
        rows = 16 // of
        regions = [Region(name, Box((k * rows, 0), (rows, 1024)), "", 0, ()) for name in shapes]
        return layout_table(regions, shapes, list(shapes) if units else None)

    count = nodes * per_node
    train = {rank: part(rank % tensor, tensor, False) for rank in range(count)}
    generate = {count + rank: part(rank % size, size, True) for rank in range(count)}
    engines = [list(range(first, first + size)) for first in range(count, 2 * count, size)]
    node = {rank: f"node{rank % count // per_node}" for rank in range(2 * count)}
    made = schedule(train, generate, engines, shapes, 2, 64 << 10, node, NetworkConfig())
    moved = refit_time.messages(made)
    ends = list(zip(moved.source.tolist(), moved.target.tolist(), strict=True))
    assert ends and all(node[source] == node[target] for source, target in ends)
    assert {target for _, target in ends} == set(generate)
