"""A step's timeline as an inline SVG, drawn here: what is drawn never changes, so it needs no JavaScript.

Ranks are rows, grouped by realm, with the realm's idle share of that step. Of a realm with many ranks some are shown, evenly
chosen; `launch/timeline.py` draws all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from launch.pages.html import Html, tag, text
from launch.pages.rollouts import evenly
from launch.past_run import PastRun
from launch.timelines import reading
from launch.timelines.reading import Rank, Step
from pipeline.timeline import Span

MOST_ROWS = 24
"""Of a realm."""
PIXELS = 1000
"""Shorter spans are merged."""
WIDTH, LEFT, RIGHT, ROW, HEAD = 1200, 140, 30, 15, 26
Shown = list[tuple[str, int, list[tuple[Rank, list[Span]]], float]]
"""Of each realm its name, how many ranks it has, those that are shown, and its idle share."""


def timelines(runs: Sequence[PastRun], labels: Sequence[str]) -> list[Html]:
    """The last complete step of each run that has a timeline."""
    found = []
    for run, label in zip(runs, labels, strict=True):
        recorded = [of for attempt in run.attempts if (of := reading.ranks(attempt))]
        if recorded:
            step = reading.step_of(reading.attempt_with(recorded, None), None, PIXELS)
            found.append(figure(step, label if len(runs) > 1 else ""))
    return found


def figure(step: Step, label: str = "") -> Html:
    shown: Shown = []
    for realm, rows in step.realms().items():
        shown.append((realm, len(rows), evenly(rows, MOST_ROWS), reading.idle_share(rows)))
    title = f"{step.title}{f' of {label}' if label else ''}, {step.end - step.begin:.3g} s"
    legend = [tag("span", tag("span", class_=f"swatch {_class(key)}", aria_hidden="true"), key) for key in step.categories()]
    picture = tag("div", _svg(step, shown, title), class_="scroll", tabindex="0")
    return tag("figure", tag("figcaption", tag("h3", title)), tag("div", *legend, class_="legend"), picture, class_="timeline")


def _class(category: str) -> str:
    return f"is-{category}"


def _svg(step: Step, shown: Shown, title: str) -> Html:
    scale = (WIDTH - LEFT - RIGHT) / (step.end - step.begin)
    parts: list[Html] = []
    y = 0
    for realm, count, rows, idle in shown:
        some = f"{count} ranks, of which {len(rows)} are shown" if len(rows) < count else f"{count} rank{'s'[: count != 1]}"
        head = text(tag("tspan", realm, class_="realm"), f": {some}, idle {idle:.0%}")
        parts.append(tag("text", head, x=0, y=y + HEAD - 9, class_="head"))
        y += HEAD
        for rank, spans in rows:
            parts.append(tag("text", rank.name, x=LEFT - 8, y=y + ROW - 4, text_anchor="end", class_="tick"))
            parts += _bars(step, spans, y, scale)
            y += ROW
    parts += _axis(step, y + 6, scale)
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {y + 26}", role="img", aria_label=title)


def _bars(step: Step, spans: list[Span], y: float, scale: float) -> Iterator[Html]:
    for each in spans:
        verb, phase = each.name
        name = (phase or "wait") if verb == "idle" else ", ".join(filter(None, [verb, phase]))
        said = f"{name}: {_seconds(each.seconds)}, from {_seconds(each.begin - step.begin)}"
        if each.count > 1:
            of = sorted(each.categories.items(), key=lambda item: -item[1])
            said += f"\n{', '.join(f'{key} {seconds / each.seconds:.0%}' for key, seconds in of)}"
        x = LEFT + scale * (each.begin - step.begin)
        place = {"x": f"{x:.1f}", "y": y + 1, "width": f"{max(0.2, scale * each.seconds):.1f}", "height": ROW - 2}
        yield tag("rect", tag("title", said), **place, class_=_class(each.category))


def _axis(step: Step, y: float, scale: float) -> Iterator[Html]:
    length = step.end - step.begin
    unit, per_unit = ("s", 1.0) if length >= 0.5 else ("ms", 1e3)
    power = 10 ** math.floor(math.log10(length / 8))
    every = next(power * each for each in (1, 2, 5, 10) if power * each >= length / 8)
    yield tag("line", x1=LEFT, x2=f"{LEFT + scale * length:.1f}", y1=y, y2=y, class_="axis")
    for i in range(int(length / every + 1e-9) + 1):
        x = f"{LEFT + scale * i * every:.1f}"
        yield tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis")
        yield tag("text", f"{per_unit * i * every:.4g} {unit}", x=x, y=y + 16, text_anchor="middle", class_="tick")


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
