"""Draw the timeline of each run's last step for a report."""

from __future__ import annotations

from collections.abc import Sequence

from launch.drawing import rank_traces, step_picture
from launch.drawing.html import Html, tag
from launch.runs.run_folder import RunFolder

PIXELS = 1000
"""Shorter spans are merged."""


def step_pictures(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Html]:
    """Return the last complete step of each run that has a timeline."""
    found = []
    for run, label in zip(runs, labels, strict=True):
        if recorded := rank_traces.attempt_traces(run.attempts):
            step = rank_traces.trace_with_step(recorded, None).step(None, PIXELS)
            found.append(_figure(step, f" of {label}" if len(runs) > 1 else ""))
    return found


def _figure(step: rank_traces.StepSpans, of: str) -> Html:
    title = f"{step.title}{of}, {step.end - step.begin:.3g} s"
    legend = [tag("span", tag("span", class_=f"swatch is-{key}", aria_hidden="true"), key) for key in step.categories()]
    drawn = tag("div", step_picture.svg_figure(step, title), class_="scroll", tabindex="0")
    return tag("figure", tag("figcaption", tag("h3", title)), tag("div", *legend, class_="legend"), drawn, class_="timeline")
