"""A PNG of one step: ranks as rows, what they did as colours, idle shares beside their realm.

Few ranks of a realm are bars with their numbers. Many are one line of pixels each, with the names of nodes or engines: of each
pixel the category that took most of its time, so that a rank which lags behind still stands out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from launch.timelines.reading import Rank, Step, idle_share
from launch.units import plural
from pipeline.timeline import CATEGORIES, Span

COLOURS = {
    "rollout": "#0072b2",
    "environment": "#cc79a7",
    "forward": "#56b4e9",
    "step": "#d55e00",
    "refit": "#009e73",
    "save": "#8a6d00",
    "coordinate": "#5a3e99",
    "other": "#7f7f7f",
    "wait": "#e9ebee",
}
"""Okabe and Ito's where they suffice; the report's page has the same."""
FEW = 24
"""Ranks of a realm that are shown as bars."""
NAMES = 16
"""Groups of a realm that are named at most."""
BAR_INCHES = 0.26
PIXELS = 1200

Row = tuple[Rank, list[Span]]


def draw(step: Step, title: str, path: Path) -> None:
    """Write a PNG to `path`. Raises OSError if it cannot be written."""
    realms = step.realms()
    heights = [_inches(rows) for rows in realms.values()]
    figure = Figure(figsize=(12, sum(heights) + 0.45 * len(heights) + 1.1), dpi=120, layout="constrained")
    panels = figure.subplots(len(realms), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    unit, scale = ("s", 1.0) if step.end - step.begin >= 0.5 else ("ms", 1e3)
    for axes, (realm, rows) in zip(panels, realms.items(), strict=True):
        (_bars if len(rows) <= FEW else _pixels)(axes, rows, step, scale)
        axes.set_title(f"{realm}: {plural(len(rows), 'rank')}, idle {idle_share(rows):.0%}", fontsize=9.5, loc="left")
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(f"time ({unit})", fontsize=9)
    panels[-1].set_xlim(0, scale * (step.end - step.begin))
    patches = [Patch(facecolor=COLOURS[key], label=key) for key in step.categories()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8.5, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, format="png")


def _inches(rows: list[Row]) -> float:
    if len(rows) <= FEW:
        return max(0.5, BAR_INCHES * len(rows))
    return float(np.clip(len(rows) / 60, 2.4, 7.0))


def _bars(axes: Axes, rows: list[Row], step: Step, scale: float) -> None:
    for at, (_, spans) in enumerate(rows):
        boxes = [(scale * (each.begin - step.begin), scale * each.seconds) for each in spans]
        axes.broken_barh(boxes, (at - 0.42, 0.84), facecolors=[COLOURS[each.category] for each in spans], linewidth=0)
    axes.set_yticks(range(len(rows)), [rank.name for rank, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _pixels(axes: Axes, rows: list[Row], step: Step, scale: float) -> None:
    image = np.stack([_dominant(spans, step) for _, spans in rows])
    colours = ListedColormap([to_rgb(COLOURS[key]) for key in CATEGORIES])
    extent = (0, scale * (step.end - step.begin), len(rows) - 0.5, -0.5)
    limits = {"vmin": -0.5, "vmax": len(CATEGORIES) - 0.5}
    axes.imshow(image, aspect="auto", interpolation="nearest", cmap=colours, extent=extent, **limits)
    groups: dict[str, list[int]] = {}
    for at, (rank, _) in enumerate(rows):
        groups.setdefault(rank.group, []).append(at)
    every = -(-len(groups) // NAMES)
    shown = dict(list(groups.items())[::every])
    axes.set_yticks([sum(at) / len(at) for at in shown.values()], list(shown))
    for at in list(groups.values())[1:] if len(groups) <= 2 * NAMES else []:
        axes.axhline(at[0] - 0.5, color="white", linewidth=0.6)


def _dominant(spans: list[Span], step: Step) -> np.ndarray:
    """[PIXELS]: of each moment the number of the category that took most of it."""
    seconds = np.zeros((len(CATEGORIES), PIXELS))
    width = (step.end - step.begin) / PIXELS
    for each in spans:
        first, last = (each.begin - step.begin) / width, (each.end - step.begin) / width
        low, high = int(first), min(int(last), PIXELS - 1)
        covered = np.ones(high - low + 1)
        covered[0] -= first - low
        covered[-1] -= max(0.0, high + 1 - last)
        for key, of in each.categories.items():
            seconds[CATEGORIES.index(key), low : high + 1] += covered * of / max(each.seconds, 1e-9)
    return seconds.argmax(0)
