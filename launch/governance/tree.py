"""Show a node as a tree of text: what it was made from, and what was made from it."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.tree import Tree

from launch.governance.graph import Lineage, LineageNode
from launch.terminal.rich_console import rich_console
from launch.terminal.safe_text import on_one_line

WIDTH = 2000
"""Columns of the virtual terminal, so many that it wraps no line."""


def text(found: Lineage, nodes: Iterable[LineageNode]) -> str:
    """Return the trees of several nodes as text, one line per node, without wrapping."""
    lines = io.StringIO()
    printer = rich_console(width=WIDTH, file=lines)
    for node in nodes:
        printer.print(tree(found, node), no_wrap=True)
    return lines.getvalue().rstrip("\n")


def tree(found: Lineage, node: LineageNode) -> Tree:
    """Return a node as a tree for rich."""
    whole = Tree(_line(node))
    for heading, edges in (("made from", found.parents), ("what was made from it", found.children)):
        if edges.get(node.key):
            _grow(whole.add(heading), found, edges, node.key, {node.key})
    return whole


def _grow(branch: Tree, found: Lineage, edges: dict[str, dict[str, str]], key: str, seen: set[str]) -> None:
    """Add the nodes that `edges` lead to, with their own branches. A node shown before appears again without its branches."""
    for other, role in edges.get(key, {}).items():
        node = found.nodes[other]
        again = other in seen and bool(edges.get(other))
        below = branch.add(_line(node, role if role not in ("made by", "exported from", node.kind) else "", again))
        if not again:
            seen.add(other)
            _grow(below, found, edges, other, seen)


def _line(node: LineageNode, role: str = "", again: bool = False) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in node.facts.items() if name != "path")
    parts = [f"{node.kind} {node.label}", f"as {role}" if role else "", facts, node.path or "", "(above)" if again else ""]
    return on_one_line("  ".join(filter(None, parts)))
