"""Print the parity table: python -m tests.train.parity [fsdp | megatron] [family ...] [layout ...] [adapters] [float64].

For each family and layout: the largest difference of log-probs and of gradients (as a share of the largest gradient) from
Hugging Face's eager model in float64, with and without adapters. `floor` is the difference of the same eager model in float32.
What the product refuses is `refused`, with the key. Without names: all of them. adapters: only with adapters. float64: FSDP2 in
float64 too, but for outputs and sums of gradients; experts have no such kernel, and Megatron-Core refuses such parameters.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

from transformers.utils import logging

from tests.train import ranks
from tests.train.megatron import layouts
from tests.train.parity import references
from tests.train.parity.cells import Cell, Found, measured
from tests.train.parity.tables import HEADER, rows, summary

F, M = ranks.Layout, layouts.Layout
FSDP = (
    F(1, 1),
    F(2, 1),
    F(1, 2),
    F(1, 2, sequence=True),
    F(1, 1, context=2),
    F(2, 1, replicas=2),
    F(2, 1, expert=2),
    F(4, 1, replicas=2),
    F(1, 1, context=4),
    F(1, 4),
    F(1, 4, sequence=True),
    F(2, 2),
    F(2, 1, context=2),
    F(1, 2, context=2),
    F(1, 2, context=2, sequence=True),
    F(2, 1, context=2, replicas=2),
    F(2, 2, replicas=2),
    F(2, 2, replicas=2, sequence=True),
    F(4, 1, expert=4),
    F(4, 1, replicas=2, expert=2),
    F(2, 2, expert=2),
    F(2, 2, expert=2, sequence=True),
    F(2, 1, context=2, expert=2),
    F(1, 2, context=2, expert=2),
    F(1, 2, context=2, expert=4, sequence=True),
)
MEGATRON = (
    M(),
    M(dp=2),
    M(tp=2),
    M(tp=2, sp=True),
    M(pp=2),
    M(cp=2),
    M(ep=2, dp=2),
    M(tp=2, ep=2, sp=True),
    M(cp=2, ep=2),
    M(tp=2, pp=2, sp=True),
    M(tp=2, cp=2, sp=True),
    M(tp=2, dp=2, sp=True),
    M(pp=2, cp=2),
    M(pp=2, dp=2),
    M(cp=4),
    M(tp=4),
    M(tp=4, sp=True),
    M(tp=4, ep=4, sp=True),
    M(ep=4, dp=4),
    M(pp=2, ep=2, dp=2),
    M(tp=2, cp=2, ep=2, sp=True),
    M(tp=2, pp=2, ep=2, sp=True),
    M(pp=2, cp=2, ep=2),
)
BACKENDS = {"fsdp": (references.FSDP, FSDP), "megatron": (references.MEGATRON, MEGATRON)}


def main(names: list[str]) -> None:
    """Print the tables of the backends, families and layouts named."""
    os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    known = {*BACKENDS, "adapters", "float64", *references.FSDP, *(one.name for _, many in BACKENDS.values() for one in many)}
    if unknown := set(names) - known:
        raise SystemExit(f"{', '.join(sorted(unknown))}: expected some of {', '.join(sorted(known))}")
    precision = "float64" if "float64" in names else "float32"
    for backend, (families, every) in BACKENDS.items():
        if not set(names).isdisjoint(BACKENDS) and backend not in names:
            continue
        chosen = [one for one in every if one.name in names] or list(every)
        cells = [
            Cell(family, adapted, precision)
            for family in [family for family in families if family in names] or families
            for adapted in (False, True)
            if adapted or "adapters" not in names
        ]
        table(backend, chosen, cells)


def table(backend: str, chosen: list, cells: list[Cell]) -> None:
    """Measure the cells, print the rows of each layout as it is measured, and then a summary."""
    found: dict[str, dict[Cell, Found]] = {}
    print("\n".join([f"## {backend}", "", *HEADER]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        references.write(Path(folder), list(dict.fromkeys(cell.family for cell in cells)))
        for layout in chosen:
            start = time.monotonic()
            found[layout.name] = measured(layout, cells, Path(folder))
            print("\n".join(rows(layout.name, found[layout.name])), flush=True)
            print(f"{backend} {layout.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(["", *summary(found), ""]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
