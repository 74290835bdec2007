"""The results of the node checks, as rank 0 gathers them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.node_checks.look import Sight
from pipeline.node_checks.network import Link, Pair


@dataclass
class Findings:
    """Results of all nodes' checks. Nodes go by their names, in the order of their first ranks."""

    ranks: dict[str, list[int]]  # of each node, ascending
    sights: dict[int, Sight] = field(default_factory=dict)  # of each rank that answered
    links: dict[Pair, Link] = field(default_factory=dict)  # of the first ranks of two nodes
    problems: dict[str, list[str]] = field(default_factory=dict)  # of each node that has some
    apart: dict[str, str] = field(default_factory=dict)  # what -> why the components cannot form one world
    notes: list[str] = field(default_factory=list)  # in what else they differ

    def blame(self, found: dict[str, list[str]]) -> None:
        for node, why in found.items():
            self.problems.setdefault(node, []).extend(why)

    @property
    def names(self) -> dict[int, str]:
        """The node of each node's first rank."""
        return {ranks[0]: node for node, ranks in self.ranks.items()}
