"""HTML as nested calls, in which text cannot become markup: whatever is not Html already is escaped.

Leaves out void elements and raw insertion but for `script` and `style`, whose contents document.py alone writes.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence


class Html(str):
    """Text that is already markup and is not escaped."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """`<name ...>children</name>`. Of an attribute's name a last `_` is dropped and others become `-` (class_, data_run).

    True gives the bare attribute; None and False leave it out, and None among the children is nothing.
    """
    said = []
    for key, value in attributes.items():
        key = key.removesuffix("_").replace("_", "-")
        if value is True:
            said.append(f" {key}")
        elif value is not None and value is not False:
            said.append(f' {key}="{html.escape(str(value))}"')
    return Html(f"<{name}{''.join(said)}>{text(*children)}</{name}>")


def text(*children: object) -> Html:
    """Return the children joined, escaped where they are not Html."""
    shown = (child if isinstance(child, Html) else html.escape(str(child)) for child in children if child is not None)
    return Html("".join(shown))


def data(value: object, class_: str) -> Html:
    """A value for the page's JavaScript, which reads it with JSON.parse. Nothing in it can end the element or begin another."""
    packed = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" class="{html.escape(class_)}">{packed}</script>')


def table(header: Sequence[object], rows: Sequence[Sequence[object]], caption: str | None = None) -> Html:
    """A table that scrolls sideways where it is too wide. A row's first cell heads it."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    inner = [tag("caption", caption)] if caption else []
    inner += [tag("thead", head)] if any(str(cell) for cell in header) else []
    return tag("div", tag("table", *inner, tag("tbody", *body)), class_="scroll", tabindex="0")
