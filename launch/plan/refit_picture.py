"""Draw a simulated refit as an SVG: the timelines of the busiest ranks, and the bytes in flight over time.

All other ranks are left out. The times and bytes come from `launch.plan.refit_time.RefitSimulation`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launch.drawing.html import Html, tag
from launch.drawing.step_picture import LEFT, RIGHT, WIDTH, axis, svg_document
from launch.plan.refit_time import GIGA, RefitSimulation

PARTS = {"pack": "c4", "wire": "c0", "apply": "c2"}  # -> a colour class of the page
LANE, GAP, FLIGHT = 15, 10, 110  # heights: of a bar, of which a rank has three; between ranks; of the bytes in flight
GENERATE_ROWS = 3


def draw(simulation: RefitSimulation, train_ranks: int, title: str) -> str:
    """Return the picture as the text of an SVG file. Ranks below `train_ranks` are train ranks."""
    scale = (WIDTH - LEFT - RIGHT) / max(simulation.seconds, 1e-9)
    parts: list[Html] = []
    y = 60
    for rank in busiest(simulation, train_ranks):
        name = f"{'train' if rank < train_ranks else 'generate'} rank {rank}"
        parts.append(tag("text", name, x=LEFT - 8, y=y + 1.5 * LANE + 4, text_anchor="end", class_="tick"))
        for part, start, stop in _bars(simulation, rank):
            parts.append(_path(start * scale, stop * scale, y, np.full(len(start), LANE - 1), PARTS[part]))
            y += LANE
        y += GAP
    parts += _flight(simulation, scale, y)
    return svg_document(title, PARTS, [*parts, *axis(simulation.seconds, y + FLIGHT + 6, scale)], y + FLIGHT + 26)


def busiest(simulation: RefitSimulation, train_ranks: int) -> list[int]:
    """Return the train rank that sends most, then GENERATE_ROWS generate ranks that receive most, in descending order."""
    sent_bytes, received_bytes = simulation.loads.sent.sum(0), simulation.loads.received.sum(0)
    generate = train_ranks + np.argsort(-received_bytes[train_ranks:], kind="stable")[:GENERATE_ROWS]
    return [int(sent_bytes[:train_ranks].argmax()), *map(int, generate)]


def _bars(simulation: RefitSimulation, rank: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (part, begins, ends) for each of PARTS. begins, ends: arrays of seconds, for the rounds that have the part."""
    active = simulation.loads.sends[:, rank] + simulation.loads.receives[:, rank] > 0
    posted, applied = simulation.posted[:, rank], simulation.applied[:, rank]
    bars = {
        "pack": (posted - simulation.parts["pack"][:, rank], posted),
        "wire": (simulation.begun[:, rank], simulation.arrived[:, rank]),
        "apply": (applied - simulation.parts["apply"][:, rank], applied),
    }
    for part, (start, stop) in bars.items():
        visible = active & (stop > start)
        yield part, start[visible], stop[visible]


def _flight(simulation: RefitSimulation, scale: float, y: float) -> Iterator[Html]:
    """Yield a path with a bar for each round, and its labels.

    A bar's height shows the bytes of the round. It extends from the start of the round's first message to the arrival of its
    last.
    """
    active = simulation.loads.sends + simulation.loads.receives > 0
    start = np.where(active, simulation.begun, np.inf).min(1, initial=np.inf)
    stop = np.where(active, simulation.arrived, 0.0).max(1, initial=0.0)
    rounds, size = active.any(1), simulation.loads.sent.sum(1)
    most = max(size.max(initial=0), 1)
    height = (FLIGHT - 10) * size[rounds] / most
    yield _path(start[rounds] * scale, stop[rounds] * scale, y + FLIGHT - height, height, "c5")
    for label, at in (("GB in flight,", y + 20), ("by round", y + 34), (f"{most / GIGA:.3g} GB at most", y + 54)):
        yield tag("text", label, x=LEFT - 8, y=at, text_anchor="end", class_="tick")


def _path(begin: np.ndarray, end: np.ndarray, y: float | np.ndarray, height: np.ndarray, class_: str) -> Html:
    """Return one SVG path with a rectangle for each bar."""
    tops = np.broadcast_to(y, begin.shape)
    rows = zip((LEFT + begin).tolist(), tops.tolist(), np.maximum(end - begin, 0.4).tolist(), height.tolist(), strict=True)
    return tag("path", d="".join(f"M{x:.2f} {top:.1f}h{w:.2f}v{h:.1f}h-{w:.2f}z" for x, top, w, h in rows), class_=class_)
