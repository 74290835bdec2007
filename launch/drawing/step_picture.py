"""Draw a step as an SVG: a row for each rank, colours for categories, idle shares beside each component.

A report embeds the picture. A separate SVG file also has the page's style, a title and a legend. If a component has at most FEW
ranks, each is a row of bars with its name and tooltips. The rows of more ranks are thin lines with the names of nodes or
engines, so that a slow rank stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from launch.drawing.html import Html, tag, text
from launch.drawing.rank_traces import RankTrace, StepSpans, idle_share
from launch.terminal.units import plural
from pipeline.observe.spans import Span

STYLE = Path(__file__).with_name("page.css")
FEW = 24
"""Maximum number of ranks of a component in a figure, and of ranks with a row of full height."""
THIN = 720
"""Approximate height of a component with many ranks."""
NAMES = 16
"""Maximum number of groups of a component that are named."""
WIDTH, LEFT, RIGHT, ROW, HEAD = 1200, 140, 30, 15, 26

Row = tuple[RankTrace, list[Span]]
Item = TypeVar("Item")


def pick_evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the items, at equal distances, from the first to the last. If `most` is 1, return the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)] if most > 1 else [items[-1]]


def svg_file(step: StepSpans, title: str) -> str:
    """Return the text of an SVG file that shows all ranks in a step."""
    return svg_document(title, {key: f"is-{key}" for key in step.categories()}, *_panels(step, len(step.rows), 56))


def svg_document(title: str, legend: Mapping[str, str], parts: Iterable[Html], height: float) -> str:
    """Return the text of an SVG file with the page's style, a title, a legend and `parts`, which must be below y = 56.

    legend: name -> CSS class of its colour. height: the height of the picture.
    """
    entries = []
    for i, (name, class_) in enumerate(legend.items()):
        entries.append(tag("rect", x=110 * i, y=30, width=12, height=12, class_=class_))
        entries.append(tag("text", name, x=110 * i + 18, y=41, class_="head"))
    head = tag("text", title, x=0, y=14, class_="head realm", style="font-size: 16px")
    box = {"viewBox": f"-20 -20 {WIDTH + 40} {height + 40}", "width": WIDTH + 40, "height": height + 40}
    look = {"class_": "timeline", "style": "background: var(--panel); font-family: system-ui, sans-serif"}
    inner = (tag("style", Html(STYLE.read_text())), head, *entries, *parts)
    return str(tag("svg", *inner, xmlns="http://www.w3.org/2000/svg", **box, **look)) + "\n"


def svg_figure(step: StepSpans, title: str) -> Html:
    """Return the picture of a step as an SVG element for a page, with at most FEW ranks of each component."""
    parts, height = _panels(step, FEW, 0)
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)


def _panels(step: StepSpans, most: int, y: float) -> tuple[list[Html], float]:
    """Return (elements of all components, one below another, and of the axis; the y at which the axis ends).

    most: the greatest number of ranks of a component. y: the top of the first component.
    """
    scale = (WIDTH - LEFT - RIGHT) / (step.end - step.begin)
    parts: list[Html] = []
    for realm, every in step.realms().items():
        rows = pick_evenly(every, most)
        some = f", of which {len(rows)} are shown" if len(rows) < len(every) else ""
        said = f": {plural(len(every), 'rank')}{some}, idle {idle_share(every):.0%}"
        parts.append(tag("text", tag("tspan", realm, class_="realm"), said, x=0, y=y + HEAD - 9, class_="head"))
        y += HEAD
        height = ROW if len(rows) <= FEW else max(1, min(ROW - 1, THIN // len(rows)))
        for name, at in _names(rows):
            parts.append(tag("text", name, x=LEFT - 8, y=f"{y + height * at + 4:.1f}", text_anchor="end", class_="tick"))
        for i, (_, spans) in enumerate(rows):
            parts += _bars(step, spans, y + height * i, height, scale)
        y += height * len(rows)
    return [*parts, *axis(step.end - step.begin, y + 6, scale)], y + 26


def _names(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """Yield (name, number of the row at whose height it is written) of each rank; of some groups if there are many ranks."""
    if len(rows) <= FEW:
        yield from ((rank.name, i + 0.5) for i, (rank, _) in enumerate(rows))
        return
    groups: dict[str, list[int]] = {}
    for i, (rank, _) in enumerate(rows):
        groups.setdefault(rank.group, []).append(i)
    for name, at in list(groups.items())[:: -(-len(groups) // NAMES)]:
        yield name, sum(at) / len(at) + 0.5


def _bars(step: StepSpans, spans: list[Span], y: float, height: float, scale: float) -> Iterator[Html]:
    for span in spans:
        x = LEFT + scale * (span.begin - step.begin)
        gap, said = (1, tag("title", _tooltip(step, span))) if height == ROW else (0, None)
        position = {"x": f"{x:.1f}", "y": y + gap, "height": height - 2 * gap, "width": f"{max(0.2, scale * span.seconds):.1f}"}
        yield tag("rect", said, **position, class_=f"is-{span.category}")


def _tooltip(step: StepSpans, span: Span) -> Html:
    verb, phase = span.name
    name = (phase or "wait") if verb == "idle" else ", ".join(filter(None, [verb, phase]))
    said = f"{name}: {_seconds(span.seconds)}, from {_seconds(span.begin - step.begin)}"
    if span.count > 1:
        of = sorted(span.categories.items(), key=lambda item: -item[1])
        said += f"\n{', '.join(f'{key} {seconds / span.seconds:.0%}' for key, seconds in of)}"
    return text(said)


def axis(length: float, y: float, scale: float) -> Iterator[Html]:
    """Yield the elements of a time axis of `length` seconds at the height `y`. scale: pixels per second."""
    unit, per_unit = ("s", 1.0) if length >= 0.5 else ("ms", 1e3)
    power = 10 ** math.floor(math.log10(length / 8))
    every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= length / 8)
    yield tag("line", x1=LEFT, x2=f"{LEFT + scale * length:.1f}", y1=y, y2=y, class_="axis")
    for i in range(int(length / every + 1e-9) + 1):
        x = f"{LEFT + scale * i * every:.1f}"
        yield tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis")
        yield tag("text", f"{per_unit * i * every:.4g} {unit}", x=x, y=y + 16, text_anchor="middle", class_="tick")


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
