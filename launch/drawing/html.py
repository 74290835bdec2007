"""Build HTML by nested calls. Every value that is not `Html` is escaped, so text cannot become markup.

Void elements are not supported. Only `script` and `style` contain text that is not escaped, and only document.py writes them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence


class Html(str):
    """A string that is already markup, so that it is not escaped."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return `<name ...>children</name>`. In attribute names, a final `_` is dropped and others become `-` (class_, data_run).

    An attribute with the value True is written without a value; None and False leave it out. Children that are None are left
    out.
    """
    written = []
    for key, value in attributes.items():
        key = key.removesuffix("_").replace("_", "-")
        if value is True:
            written.append(f" {key}")
        elif value is not None and value is not False:
            written.append(f' {key}="{html.escape(str(value))}"')
    return Html(f"<{name}{''.join(written)}>{text(*children)}</{name}>")


def text(*children: object) -> Html:
    """Return the children joined. Those that are not Html are escaped, and those that are None are left out."""
    shown = (child if isinstance(child, Html) else html.escape(str(child)) for child in children if child is not None)
    return Html("".join(shown))


def data(value: object, class_: str) -> Html:
    """Return a `script` element with a value in JSON, which the page's JavaScript reads with JSON.parse.

    Text in the value cannot end the element or begin another one.
    """
    packed = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" class="{html.escape(class_)}">{packed}</script>')


def table(header: Sequence[object], rows: Sequence[Sequence[object]], caption: str | None = None) -> Html:
    """Return a table that scrolls horizontally if it is too wide. The first cell of a row is its header."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = [tag("caption", caption)] if caption else []
    inner += [tag("thead", head)] if any(str(cell) for cell in header) else []
    return tag("div", tag("table", *inner, tag("tbody", *body)), class_="scroll", tabindex="0")
