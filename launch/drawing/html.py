"""Render pages and pictures from Jinja templates (`*.j2`), and single elements by calls. A value that is not `Html` is escaped.

`tag` writes no void elements. Only `script` and `style` contain text that is not escaped, and only the files of this repository
are written there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

Html = Markup
"""A string that is already markup, so that it is not escaped. Its own methods escape what they insert."""
LAUNCH = Path(__file__).parents[1]


@functools.cache
def templates() -> Environment:
    """Return the templates below `launch/`. They escape every value, leave out None, and may call `data` and `table`."""
    found = Environment(
        loader=FileSystemLoader(LAUNCH),
        autoescape=True,
        finalize=lambda value: "" if value is None else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"data": data, "table": table}
    return found


def render(template: str, **values: object) -> Html:
    """Return the text of a template. template: its path below `launch/`."""
    return Html(templates().get_template(template).render(values))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return `<name ...>children</name>`. In attribute names, a final `_` is dropped and others become `-` (class_, data_run).

    An attribute with the value True is written without a value; None and False leave it out. Children that are None are left
    out.
    """
    written = [
        Html(" {}" if value is True else ' {}="{}"').format(key.removesuffix("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    return Html(f"<{name}{''.join(written)}>{text(*children)}</{name}>")


def text(*children: object) -> Html:
    """Return the children joined. Those that are not Html are escaped, and those that are None are left out."""
    return Html("").join(escape(child) for child in children if child is not None)


def data(value: object, class_: str) -> Html:
    """Return a `script` element with a value in JSON, which the page's JavaScript reads with JSON.parse.

    Text in the value cannot end the element or begin another one.
    """
    packed = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(packed), type="application/json", class_=class_)


def table(header: Sequence[object], rows: Sequence[Sequence[object]], caption: str | None = None) -> Html:
    """Return a table that scrolls horizontally if it is too wide. The first cell of a row is its header."""
    return render("drawing/table.html.j2", header=header, rows=rows, caption=caption)
