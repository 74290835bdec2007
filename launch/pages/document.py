"""A page in one file: its style and its JavaScript are inside, and nothing is loaded from anywhere.

What the page shows was written by models and users, so three things each keep it from running: all text is escaped (html.py),
the JavaScript sets text and never markup, and a content security policy lets the browser run these scripts alone, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.pages.chart import COLOURS
from launch.pages.html import Html, data, tag, text

HERE = Path(__file__).parent
SCRIPTS = ("charts.js", "samples.js")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""As broken text may hold them; they have no UTF-8."""


@dataclass(frozen=True)
class Section:
    title: str
    content: Sequence[Html]
    note: str = ""  # a sentence below the title

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def html(self) -> Html:
        note = tag("p", self.note, class_="note") if self.note else None
        return tag("section", tag("h2", self.title), note, *self.content, id=self.anchor)


def document(title: str, sections: Sequence[Section], runs: Sequence[str] = (), intro: Html | None = None) -> str:
    """The whole page. runs: names for the colours that charts know by number; several get buttons that hide them."""
    style = _read("page.css")
    scripts = [_read(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)};"
        f" script-src {' '.join(map(_hash, scripts))}"
    )
    head = [
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    ]
    nav = tag("nav", *(tag("a", section.title, href=f"#{section.anchor}") for section in sections), aria_label="Sections")
    body = [
        tag("header", tag("h1", title), intro, nav),
        _toolbar(runs),
        tag("main", *(section.html() for section in sections)),
        tag("noscript", tag("p", "The charts and samples are drawn by JavaScript, which is switched off here.")),
        data(list(runs), "runs-data"),
        *(Html(f"<script>{script}</script>") for script in scripts),
    ]
    page = f'<!DOCTYPE html>\n<html lang="en">{tag("head", *head)}{tag("body", *body)}</html>\n'
    return LONE_SURROGATE.sub("\ufffd", page)


def _toolbar(runs: Sequence[str]) -> Html:
    buttons = [
        tag("button", swatch(i), name, type="button", class_="run", data_run=i, aria_pressed="true")
        for i, name in enumerate(runs)
        if len(runs) > 1
    ]
    controls = [
        tag("label", Html('<input type="checkbox" id="log">'), " log y"),
        tag(
            "label",
            "smoothing ",
            Html('<input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0">'),
            tag("output", "off", for_="smoothing"),
        ),
    ]
    return tag("div", tag("div", *buttons, class_="runs"), tag("div", *controls, class_="controls"), class_="toolbar")


def swatch(run: int) -> Html:
    """A run's colour, as a small square before its name."""
    dashed = " dashed" if run >= COLOURS else ""
    return tag("span", class_=f"swatch c{run % COLOURS}{dashed}", aria_hidden="true")


def folded(summary: str, *content: Html, open_: bool = False) -> Html:
    """Content that is opened by a click."""
    return tag("details", tag("summary", summary), text(*content), open=open_)


def _read(name: str) -> str:
    source = (HERE / name).read_text()
    if "</" in source:
        raise ValueError(f"{name}: '</' may end the element that it is put into")
    return source


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
