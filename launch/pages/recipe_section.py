"""Show the resolved recipe of each run, and a table of the differences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from launch.drawing.html import Html, table, tag, text
from launch.pages.chart import swatch
from launch.pages.document import details
from launch.runs.run_folder import RunFolder
from pipeline.config import environment_names

MISSING = "-"


def recipes(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Html]:
    """Return each run's recipe.yaml and, for several runs, a table of the keys that differ."""
    content = []
    if len(runs) > 1:
        rows = differences([environment_names.named(run.folder, run.recipe) for run in runs])
        header = ["key", *(text(swatch(i), label) for i, label in enumerate(labels))]
        shown = [[tag("code", key), *(tag("code", value) for value in values)] for key, values in rows]
        content.append(table(header, shown, "What differs") if rows else tag("p", "The recipes are the same."))
    for run, label in zip(runs, labels, strict=True):
        source = tag("pre", environment_names.recipe_text(run.folder))
        content.append(details(f"recipe.yaml of {label}" if len(runs) > 1 else "recipe.yaml", source, open_=len(runs) == 1))
    return content


def differences(recipes: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Yield (dotted key, value in each recipe) for keys that differ, except the run folder."""
    flat = [dict(_flat(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [(key, [each.get(key, MISSING) for each in flat]) for key in keys if key != "run_dir"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
