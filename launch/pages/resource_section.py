"""Make the section of a report that shows resources: warnings in a table, and charts of the metrics `resources/...`."""

from __future__ import annotations

from collections.abc import Sequence

from launch.drawing.html import Html, table
from launch.pages.chart import Chart
from launch.pages.curves import Curves, LabelledRun
from launch.pages.overview import moment
from launch.runs import resources


def charts(curves: Curves) -> list[Chart]:
    """Return the charts of resources. Which rank is at the max is no curve."""
    curves.left = [key for key in curves.left if not (key.startswith(resources.RESOURCES) and key.endswith("_max_rank"))]
    return curves.take(resources.RESOURCES)


def warnings(labelled: Sequence[LabelledRun]) -> list[Html]:
    """Return a table of the warnings of each run's last attempt; none for a run without."""
    content = []
    for each in labelled:
        rows = [
            [line["step"], moment(line["time"]), line.get("rank"), line.get("message")] for line in resources.warnings(each.run)
        ]
        if rows:
            of = f" of {each.label}" if len(labelled) > 1 else ""
            content.append(table(["step", "time", "rank", "warning"], rows, f"Warnings{of}"))
    return content
