"""Build HTML by nested calls. Everything that is not `Html` is escaped, so text cannot become markup.

Void elements are not supported. Raw text exists only in `script` and `style`, which only document.py writes.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence


class Html(str):
    """Text that is already markup and is not escaped."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return `<name ...>children</name>`. In attribute names a final `_` is dropped and others become `-` (class_, data_run).

    True gives the bare attribute; None and False leave it out. Children that are None are left out.
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
    """Return the children joined, escaped where they are not Html."""
    shown = (child if isinstance(child, Html) else html.escape(str(child)) for child in children if child is not None)
    return Html("".join(shown))


def data(value: object, class_: str) -> Html:
    """Return a value for the page's JavaScript, which reads it with JSON.parse. It cannot end the element or begin another."""
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
