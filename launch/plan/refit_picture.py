"""A picture of a simulated refit: what the busiest ranks do when, and how many bytes are on their way.

Not counted: all other ranks. The numbers behind the picture are `launch.plan.refit_time.Timeline`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch.plan.refit_time import GIGA, Timeline

COLOURS = {"pack": "#e69f00", "wire": "#0072b2", "apply": "#009e73"}  # Okabe and Ito's, told apart by everybody
LANE = 0.27  # height of a bar; a rank's row has three
GENERATE_ROWS = 3
FEW_ROUNDS = 64  # so many bars are told apart by white edges; more would be nothing but edges


def draw(timeline: Timeline, train_ranks: int, title: str, path: Path) -> None:
    """Write a PNG to `path`. Ranks below `train_ranks` train. Raises OSError if it cannot be written."""
    ranks = busiest(timeline, train_ranks)
    figure = Figure(figsize=(12, 1.6 + 0.9 * (len(ranks) + 2)), dpi=120, layout="constrained")
    rows, flight = figure.subplots(2, 1, sharex=True, height_ratios=(len(ranks), 1.5))
    unit, scale = ("s", 1.0) if timeline.seconds >= 1 else ("ms", 1e3)
    for row, rank in enumerate(ranks):
        _draw_rank(rows, row, timeline, rank, scale)
    rows.set_yticks(range(len(ranks)), [f"{'train' if rank < train_ranks else 'generate'}\nrank {rank}" for rank in ranks])
    rows.invert_yaxis()
    rows.set_title(title, fontsize=10, loc="left")
    rows.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(COLOURS), fontsize=8, frameon=False)
    _draw_flight(flight, timeline, scale)
    flight.set_xlabel(f"time ({unit})")
    flight.set_xlim(0, timeline.seconds * scale)
    figure.savefig(path, format="png")


def busiest(timeline: Timeline, train_ranks: int) -> list[int]:
    """Return the train rank that sends most, and the generate ranks that receive most, in the order of their bytes."""
    sent, received = timeline.loads.sent.sum(0), timeline.loads.received.sum(0)
    generate = train_ranks + np.argsort(-received[train_ranks:], kind="stable")[:GENERATE_ROWS]
    return [int(sent[:train_ranks].argmax()), *map(int, generate)]


def _draw_rank(axes: Axes, row: int, timeline: Timeline, rank: int, scale: float) -> None:
    active = timeline.loads.sends[:, rank] + timeline.loads.receives[:, rank] > 0
    parts = timeline.parts
    bars = {
        "pack": (timeline.posted[:, rank] - parts["pack"][:, rank], timeline.posted[:, rank]),
        "wire": (timeline.begun[:, rank], timeline.arrived[:, rank]),
        "apply": (timeline.applied[:, rank] - parts["apply"][:, rank], timeline.applied[:, rank]),
    }
    for lane, (name, (start, stop)) in enumerate(bars.items()):
        spans = np.stack([start, stop - start], 1)[active & (stop > start)] * scale
        low = row + (lane - 1.5) * LANE
        label = name if row == 0 else None
        edge = _edge(COLOURS[name], len(active))
        axes.broken_barh(spans, (low, LANE), facecolor=COLOURS[name], edgecolor=edge, linewidth=0.3, label=label)


def _edge(colour: str, rounds: int) -> str:
    return "white" if rounds <= FEW_ROUNDS else colour


def _draw_flight(axes: Axes, timeline: Timeline, scale: float) -> None:
    """Draw a bar for each round, from when its first message begins until its last one has arrived."""
    active = timeline.loads.sends + timeline.loads.receives > 0
    start = np.where(active, timeline.begun, np.inf).min(1, initial=np.inf)
    stop = np.where(active, timeline.arrived, 0.0).max(1, initial=0.0)
    some = active.any(1)
    size = timeline.loads.sent.sum(1)
    axes.bar(
        start[some] * scale,
        size[some] / GIGA,
        (stop - start)[some] * scale,
        align="edge",
        facecolor="#8fbbdb",  # lighter than the wire's
        edgecolor=_edge("#8fbbdb", len(size)),
        linewidth=0.3,
    )
    axes.set_ylabel("GB in flight,\nby round")
