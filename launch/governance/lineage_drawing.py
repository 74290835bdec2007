"""Draw the ancestors and descendants of a node as a picture in SVG, older ones on the left."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

from launch.governance.graph import Lineage, LineageNode
from pipeline.config import Problem, RecipeError
from pipeline.files.storage import write_durably

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 210, 44, 60, 16, 20  # pixels: of a box, between boxes, around all
MOST_LETTERS = 30
COLOURS = {
    "data": "#fde9c8",
    "prompt": "#fde9c8",
    "model": "#e3dcf5",
    "image": "#eeeeee",
    "run": "#cfe6fb",
    "checkpoint": "#ffffff",
    "export": "#d3f0d6",
    "evaluation": "#fbd9e0",
}


def write(found: Lineage, begin: list[LineageNode], path: Path) -> None:
    """Write the picture as an .svg, or within an .html page. Raises RecipeError for another suffix or a missing folder."""
    if not path.parent.is_dir():
        raise RecipeError(Problem("draw", "file-not-found", f"got {path}; expected a file in a folder that exists"))
    picture = svg(found, begin)
    if path.suffix == ".html":
        title = html.escape(begin[0].label)
        picture = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Lineage of {title}</title>\n{picture}</html>\n'
    elif path.suffix != ".svg":
        raise RecipeError(Problem("draw", "bad-format", f"got {path.name}; expected a name that ends in .html or .svg"))
    write_durably(path, picture)


def svg(found: Lineage, begin: list[LineageNode]) -> str:
    """Return an SVG picture of these nodes with all their ancestors and descendants."""
    keys = [node.key for node in begin]
    shown = [*keys, *found.beyond(keys, down=False), *found.beyond(keys, down=True)]
    places = _places(found, list(dict.fromkeys(shown)))
    right = max(x for x, _ in places.values()) + WIDTH + MARGIN
    below = max(y for _, y in places.values()) + HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{below}" font-family="sans-serif" font-size="12">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        *_edges(found, places),
        *(_box(found.nodes[key], place, key in keys) for key, place in places.items()),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _places(found: Lineage, keys: list[str]) -> dict[str, tuple[int, int]]:
    """Return node -> (x, y) of its box, in pixels. Its column is to the right of the columns of all its parents."""
    depth: dict[str, int] = {}

    def of(key: str) -> int:
        if key not in depth:
            depth[key] = 0  # ends a circle
            depth[key] = 1 + max((of(parent) for parent in found.parents.get(key, ()) if parent in inside), default=-1)
        return depth[key]

    inside = set(keys)
    columns: dict[int, list[str]] = {}
    for key in sorted(keys, key=of):
        columns.setdefault(of(key), []).append(key)
    rows: dict[str, int] = {}
    for column in (columns[number] for number in sorted(columns)):
        above = {key: [rows[parent] for parent in found.parents.get(key, ()) if parent in rows] for key in column}
        column.sort(key=lambda key: (sum(above[key]) / len(above[key]) if above[key] else 0.0, found.nodes[key].label))
        rows |= {key: row for row, key in enumerate(column)}
    return {key: (MARGIN + depth[key] * (WIDTH + GAP_X), MARGIN + rows[key] * (HEIGHT + GAP_Y)) for key in rows}


def _edges(found: Lineage, places: dict[str, tuple[int, int]]) -> Iterable[str]:
    for child, (x, y) in places.items():
        for parent, role in found.parents.get(child, {}).items():
            if parent in places:
                begin, middle = places[parent][0] + WIDTH, places[parent][1] + HEIGHT // 2
                bend = (begin + x) // 2
                line = f"M{begin} {middle}C{bend} {middle} {bend} {y + HEIGHT // 2} {x} {y + HEIGHT // 2}"
                title = f"<title>{html.escape(role)}</title>"
                yield f'<path d="{line}" fill="none" stroke="#555" marker-end="url(#end)">{title}</path>'


def _box(node: LineageNode, place: tuple[int, int], is_asked: bool) -> str:
    x, y = place
    label = node.label if len(node.label) <= MOST_LETTERS else f"{node.label[: MOST_LETTERS - 1]}…"
    facts = "\n".join([node.label, *(f"{name}: {value}" for name, value in node.facts.items()), node.path or "not here"])
    return (
        f'<g><title>{html.escape(facts)}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"'
        f' fill="{COLOURS[node.kind]}" stroke="{"#000" if is_asked else "#999"}" stroke-width="{2 if is_asked else 1}"/>'
        f'<text x="{x + 8}" y="{y + 18}" font-weight="bold">{html.escape(label)}</text>'
        f'<text x="{x + 8}" y="{y + 34}" fill="#555">{node.kind}</text></g>'
    )
