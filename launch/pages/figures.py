"""Figures with axes of their own, as traces of Plotly, which drawings.js draws in the browser.

Charts over steps are in chart.py. Colours are names of page.css, such as `var(--c0)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.drawing.html import Html, data, tag


def drawing(title: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], note: str = "") -> Html:
    """Return a figure with its title and a note below it. Texts in the traces must be escaped: `chart.plotly_text`."""
    caption = tag("figcaption", tag("h3", title), tag("p", note) if note else None)
    return tag("figure", caption, data({"data": list(traces), "layout": layout}, "drawing-data"), class_="drawing")
