"""Draw a priced refit as an SVG: the rounds of the busiest ranks, and the bytes of each round.

All other ranks are left out. The times and bytes come from `launch.plan.refit_time.RefitPrice`.
"""

from __future__ import annotations

import numpy as np

from launch.drawing.html import Html, tag
from launch.drawing.step_picture import LEFT, RIGHT, WIDTH, axis, svg_document
from launch.plan.refit_time import GIGA, RefitPrice

PARTS = {"pack": "c4", "wire": "c0", "apply": "c2"}  # -> a colour class of the page
LANE, GAP, FLIGHT = 15, 10, 110  # heights: of a bar, of which a rank has three; between ranks; of the bytes in flight
GENERATE_ROWS = 3


def draw(price: RefitPrice, train_ranks: int, title: str) -> str:
    """Return the picture as the text of an SVG file. Ranks below `train_ranks` are train ranks."""
    scale = (WIDTH - LEFT - RIGHT) / max(price.seconds, 1e-9)
    starts, packs, applies = price.starts, price.parts["pack"], price.parts["apply"]
    lanes = {  # begins and lengths: a round is packed during the one before it, and applied during the one after it
        "pack": (np.concatenate([[0.0], starts[:-1]]), packs),
        "wire": (starts, price.wire),
        "apply": (starts + price.rounds, applies),
    }
    parts: list[Html] = []
    y = 60
    for rank in busiest(price, train_ranks):
        name = f"{'train' if rank < train_ranks else 'generate'} rank {rank}"
        parts.append(tag("text", name, x=LEFT - 8, y=y + 1.5 * LANE + 4, text_anchor="end", class_="tick"))
        for part, (begins, lengths) in lanes.items():
            visible = lengths[:, rank] > 0
            parts.append(_path(begins[visible] * scale, lengths[visible, rank] * scale, y, LANE - 1.0, PARTS[part]))
            y += LANE
        y += GAP
    sent = price.loads.sent.sum(1)
    most = sent.max(initial=0)
    height = (FLIGHT - 10) * sent / max(most, 1)
    parts.append(_path(starts * scale, price.rounds * scale, y + FLIGHT - height, height, "c5"))
    for label, at in (
        ("GB in flight,", y + 20),
        ("by round", y + 34),
        (f"{most / GIGA:.3g} GB at most", y + 54),
    ):
        parts.append(tag("text", label, x=LEFT - 8, y=at, text_anchor="end", class_="tick"))
    return svg_document(title, PARTS, [*parts, *axis(price.seconds, y + FLIGHT + 6, scale)], y + FLIGHT + 26)


def busiest(price: RefitPrice, train_ranks: int) -> list[int]:
    """Return the train rank that sends most, then GENERATE_ROWS generate ranks that receive most, in descending order."""
    sent_bytes, received_bytes = price.loads.sent.sum(0), price.loads.received.sum(0)
    generate = train_ranks + np.argsort(-received_bytes[train_ranks:], kind="stable")[:GENERATE_ROWS]
    return [int(sent_bytes[:train_ranks].argmax()), *map(int, generate)]


def _path(begin: np.ndarray, length: np.ndarray, y: float | np.ndarray, height: float | np.ndarray, class_: str) -> Html:
    """Return one SVG path with a rectangle for each bar."""
    columns = np.broadcast_arrays(LEFT + begin, y, np.maximum(length, 0.4), height)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tag("path", d="".join(f"M{x:.2f} {top:.1f}h{w:.2f}v{h:.1f}h-{w:.2f}z" for x, top, w, h in rows), class_=class_)
