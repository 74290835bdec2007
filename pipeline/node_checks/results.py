"""The results of the node checks: rank 0 gathers them, writes them to nodes.json and logs them as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.node_checks import diagnosis
from pipeline.node_checks.probe import RankReport
from pipeline.node_checks.ring import Link, Pair


@dataclass
class CheckResults:
    """The results of all nodes' checks. Nodes are in the order of their first ranks."""

    ranks: dict[str, list[int]]  # of each node, ascending
    reports: dict[int, RankReport] = field(default_factory=dict)  # of each rank that answered
    links: dict[Pair, Link] = field(default_factory=dict)  # of the first ranks of two nodes
    problems: dict[str, list[str]] = field(default_factory=dict)  # of each node that has some
    mismatches: dict[str, str] = field(default_factory=dict)  # what differs -> why components cannot form one world
    notes: list[str] = field(default_factory=list)  # other differences between components

    def add_problems(self, found: dict[str, list[str]]) -> None:
        """Add problems. found: node -> its problems."""
        for node, why in found.items():
            self.problems.setdefault(node, []).extend(why)

    @property
    def names(self) -> dict[int, str]:
        """First rank of each node -> the node's name."""
        return {ranks[0]: node for node, ranks in self.ranks.items()}


# ---- nodes.json and the log -------------------------------------------------------------------------------------------------


def record(results: CheckResults, seconds: float) -> dict[str, Any]:
    """Return the content of nodes.json.

    {"seconds", "nodes": {name: {...}}, "images": [why components form no world], "notes": [other differences]}

    GB are 10^9 bytes. `gb_per_s` is node at the other end -> GB/s. `clock_skew_s` is the seconds by which a node's clock is
    ahead of rank 0's, null if it was not measured.
    """
    skews, speeds = diagnosis.clock_offsets(results.links), _speeds(results)
    nodes = {}
    for node, ranks in results.ranks.items():
        there = [results.reports[rank] for rank in ranks if rank in results.reports]
        node_reports = [report.node for report in there if report.node]
        skew, error = skews.get(ranks[0], (None, None))
        nodes[node] = {
            "ranks": ranks,
            "problems": results.problems.get(node, []),
            "seconds": round(max((report.seconds for report in there), default=0.0), 3),
            "gpus": [
                {"rank": report.rank, "uuid": report.gpu.uuid, "name": report.gpu.name}
                | {"memory_gb": round(report.gpu.memory_gb, 2), "used_gb": round(report.gpu.used_gb, 2)}
                for report in there
                if report.gpu
            ],
            "gb_per_s": speeds[node],
            "clock_skew_s": None if skew is None else round(skew, 6),
            "clock_error_s": None if error is None else round(error, 6),
            "code": node_reports[0].code if node_reports else None,
            "versions": [report.versions for report in node_reports],  # of each component
            "memory_gb": round(node_reports[0].memory_gb, 2) if node_reports else None,
            "cpu": node_reports[0].cpu if node_reports else None,
            "free_gb": {folder: round(free, 3) for report in node_reports for folder, free in report.free_gb.items()},
        }
    return {"seconds": round(seconds, 3), "nodes": nodes, "images": [*results.mismatches.values()], "notes": results.notes}


def _speeds(results: CheckResults) -> dict[str, dict[str, float]]:
    """Return node -> node at the other end -> GB/s of the link."""
    names = results.names
    found: dict[str, dict[str, float]] = {node: {} for node in results.ranks}
    for (one, other), link in results.links.items():
        found[names[one]][names[other]] = found[names[other]][names[one]] = round(link.gb_per_s, 3)
    return found


def text(record: dict[str, Any]) -> str:
    """Return a table with a line for each node, and a summary."""
    rows = [("node", "ranks", "GPUs", "GB/s to other nodes", "clock", "free: memory, temporary", "")]
    rows += [_row(name, node) for name, node in record["nodes"].items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
    lines += [*record["images"], *record["notes"]]
    return "\n".join([*lines, summary(record)])


def _row(name: str, node: dict[str, Any]) -> tuple[str, ...]:
    ranks, skew = node["ranks"], node["clock_skew_s"]
    free = [] if node["memory_gb"] is None else [f"{node['memory_gb']:.0f} GB"]
    return (
        name,
        str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
        _kinds(node["gpus"]),
        ", ".join(f"{speed:.3g} {peer}" for peer, speed in node["gb_per_s"].items()),
        "" if skew is None else f"{'+' if skew >= 0 else ''}{_time(skew)} ± {_time(node['clock_error_s'])}",
        ", ".join([*free, *(f"{folder} {gb:.3g} GB" for folder, gb in node["free_gb"].items())]),
        "; ".join(node["problems"]),
    )


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.1f} ms"


def _kinds(gpus: list[dict[str, Any]]) -> str:
    names = sorted({gpu["name"] or "none" for gpu in gpus})
    return f"{len(gpus)} {' and '.join(names)}" if gpus else "-"


def summary(record: dict[str, Any]) -> str:
    """Return a one-line summary."""
    nodes = record["nodes"]
    bad = sum(1 for node in nodes.values() if node["problems"])
    parts = [f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} checked in {record['seconds']:.2f} s"]
    parts.append(f"{bad} failed" if bad else "the components do not match" if record["images"] else "no problems")
    if speeds := [(speed, name, peer) for name, node in nodes.items() for peer, speed in node["gb_per_s"].items()]:
        speed, one, other = min(speeds)
        parts.append(f"the slowest link {speed:.3g} GB/s ({one} - {other})")
    if skews := [abs(node["clock_skew_s"]) for node in nodes.values() if node["clock_skew_s"] is not None]:
        parts.append(f"clocks within {_time(max(skews))} of rank 0's")
    return ", ".join(parts)
