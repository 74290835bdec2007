"""Draw the ancestors and descendants of a node as a picture in SVG, older ones on the left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launch.drawing.html import render
from launch.governance.graph import Lineage, LineageNode
from pipeline.config import Problem, RecipeError
from pipeline.files.storage import write_durably

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 210, 44, 60, 16, 20  # pixels: of a box, between boxes, around all
COLOURS = {
    "data": "#fde9c8",
    "prompt": "#fde9c8",
    "code": "#fde9c8",
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
    if path.suffix not in (".html", ".svg"):
        raise RecipeError(Problem("draw", "bad-format", f"got {path.name}; expected a name that ends in .html or .svg"))
    write_durably(path, draw(found, begin, path.suffix == ".html"))


def draw(found: Lineage, begin: list[LineageNode], page: bool = False) -> str:
    """Return an SVG picture of these nodes with all their ancestors and descendants. page: within an HTML page."""
    keys = [node.key for node in begin]
    shown = [*keys, *found.beyond(keys, down=False), *found.beyond(keys, down=True)]
    places = _places(found, list(dict.fromkeys(shown)))
    right = max(x for x, _ in places.values()) + WIDTH + MARGIN
    below = max(y for _, y in places.values()) + HEIGHT + MARGIN
    title = begin[0].label
    boxes = [(found.nodes[key], x, y, key in keys) for key, (x, y) in places.items()]
    sizes = {"right": right, "below": below, "width": WIDTH, "height": HEIGHT, "colours": COLOURS}
    return render("governance/lineage.svg.j2", title=title, edges=_edges(found, places), boxes=boxes, page=page, **sizes)


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


def _edges(found: Lineage, places: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Yield (role, path in SVG) of each edge between these nodes."""
    for child, (x, y) in places.items():
        for parent, role in found.parents.get(child, {}).items():
            if parent in places:
                begin, middle = places[parent][0] + WIDTH, places[parent][1] + HEIGHT // 2
                bend = (begin + x) // 2
                yield role, f"M{begin} {middle}C{bend} {middle} {bend} {y + HEIGHT // 2} {x} {y + HEIGHT // 2}"
