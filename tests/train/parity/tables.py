"""The parity table in Markdown."""

from __future__ import annotations

from tests.train.parity.cells import Cell, Found

HEADER = (
    "| layout | family | log-probs | floor | gradients | floor | adapters: log-probs | floor | gradients | floor |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def rows(layout: str, found: dict[Cell, Found]) -> list[str]:
    """Return a line for each family at this layout. found: what became of each cell."""
    lines = []
    for family in dict.fromkeys(cell.family for cell in found):
        both = [next((c for c in found if c.family == family and c.adapted == on), None) for on in (False, True)]
        columns = [_columns(found[cell]) if cell else "| | | " for cell in both]
        lines.append(f"| {layout} | {family} | {' | '.join(columns)} |")
    return lines


def _columns(found: Found) -> str:
    if found.difference:
        ours, floor = found.difference, found.floor
        return f"{ours.logprob:.1e} | {floor.logprob:.1e} | {ours.gradient:.1e} | {floor.gradient:.1e}"
    return f"refused: {found.refused} | | |" if found.refused else f"FAILS: {found.error.replace('|', '/')[:200]} | | |"


def summary(found: dict[str, dict[Cell, Found]]) -> list[str]:
    """Return a table with a line for each family: the floor, and the largest differences of all layouts."""
    lines = [
        "| family | adapters | layouts | refused | fail | log-probs, floor | largest | at | gradients, floor | largest | at |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in dict.fromkeys(cell for row in found.values() for cell in row):
        of = {layout: row[cell] for layout, row in found.items()}
        right = {layout: one for layout, one in of.items() if one.difference}
        refused, failed = (sum(bool(getattr(one, name)) for one in of.values()) for name in ("refused", "error"))
        counts = f"| {cell.family} | {'yes' if cell.adapted else 'no'} | {len(right)} | {refused} | {failed} |"
        lines.append(counts + " ".join(_worst(right, name) for name in ("logprob", "gradient") if right))
    return lines


def _worst(found: dict[str, Found], name: str) -> str:
    layout = max(found, key=lambda one: getattr(found[one].difference, name))
    floor, largest = (getattr(one, name) for one in (found[layout].floor, found[layout].difference))
    return f" {floor:.1e} | {largest:.1e} | {layout} |"
