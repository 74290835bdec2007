"""Write a page with its style and its JavaScript inline. The pages of a folder share one file with Plotly's script.

The page shows texts of models and users. Three measures, each sufficient by itself, keep these texts from running as code. All
text is escaped (by html.py, and by chart.py for Plotly's own markup). The JavaScript sets text and never markup. A content
security policy lets the browser run only the page's scripts, which it identifies by hash, and Plotly's, by a nonce.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.drawing.html import Html, render, tag, text
from launch.pages.chart import swatch
from pipeline.files.storage import write_durably

HERE = Path(__file__).parent
STYLE = HERE.parent / "drawing/page.css"
SCRIPTS = (HERE / "charts.js", HERE / "drawings.js", HERE / "samples.js")
PLOTLY = "plotly.min.js"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which broken text may contain and UTF-8 cannot encode."""


@dataclass(frozen=True)
class Section:
    """A section of a page. The caller leaves out sections without content."""

    title: str
    content: Sequence[Html]
    note: str = ""  # a sentence below the title

    @property
    def anchor(self) -> str:
        """Return the section's id, to which the navigation links."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def add_plotly(folder: Path) -> bool:
    """Copy Plotly's script into a folder of pages, and return whether the folder has the script.

    It can lack the script only if Plotly is not installed; then the pages show no charts. Raises OSError.
    """
    script = folder / PLOTLY
    spec = importlib.util.find_spec("plotly")  # only its script is needed; importing the package takes seconds
    if spec is None or spec.origin is None:
        return script.exists()
    source = Path(spec.origin).parent / "package_data" / PLOTLY
    if not script.exists() or script.stat().st_size != source.stat().st_size:
        write_durably(script, source.read_text(encoding="utf-8"))
    return True


def document(title: str, sections: Sequence[Section], runs: Sequence[str] = (), intro: Html | None = None) -> str:
    """Return the text of the whole page. runs: names of runs, in the order of their colours; several runs get buttons."""
    scripts = [_read(path) for path in SCRIPTS]
    nonce = secrets.token_urlsafe(16)
    policy = Html(
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; style-src 'unsafe-inline';"
        f" script-src 'nonce-{nonce}' {' '.join(map(_hash, scripts))}"
    )  # Plotly sets styles, and saves a chart as a picture by way of blob:
    page = render(
        "pages/document.html.j2",
        title=title,
        sections=sections,
        runs=list(runs),
        intro=intro,
        style=_read(STYLE),
        scripts=scripts,
        policy=policy,
        nonce=nonce,
        plotly=PLOTLY,
        swatch=swatch,
    )
    return LONE_SURROGATE.sub("\ufffd", page)


def details(summary: str, *content: Html, open_: bool = False) -> Html:
    """Return an element that shows its content after a click on the summary."""
    return tag("details", tag("summary", summary), text(*content), open=open_)


def _read(path: Path) -> Html:
    source = path.read_text(encoding="utf-8")
    if "</" in source:
        raise ValueError(f"{path.name}: got '</', which can end the HTML element around the text; expected none")
    return Html(source)


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
