"""Write a report of runs as an HTML page with `python launch/report.py run=RUN_DIR [run=RUN_DIR ...] [out=FILE]`.

The page shows curves, evaluations, phase times, a timeline, refits, lengths, samples and recipes. Curves of several runs share
a chart, and their evaluations are compared question by question. The page loads only plotly.min.js, which is written beside it.
The command also prints first and last values, scores and three samples of each run. It reads only files, so a run may be
active, or from an older version. In the folder of an encrypted run the page has no samples; out=FILE writes a page with samples
elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.pages import report_page
from launch.pages.curves import LabelledRun
from launch.runs import evaluation_folder as evaluation_folders
from launch.runs import run_keys, score_tables
from launch.runs.run_folder import MetricColumns
from launch.terminal import command_line, console
from launch.terminal.command_line import Key
from launch.terminal.units import plural, size
from pipeline.config import RecipeError
from pipeline.observe.metrics import read_rollouts

EVALUATE = "evaluate"
PRINTED = ("val/accuracy", "val/loss", "train/reward")


@dataclass(frozen=True)
class ReportRequest:
    """The command line."""

    run: Annotated[list[Path], Key("RUN_DIR", "a run folder; repeat the argument for several runs", bare=True)]
    out: Annotated[
        Path | None, Key("FILE", "the page; default: RUN_DIR/report.html for one run, ./report.html for several runs")
    ] = None


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, ReportRequest, execute, arguments)


def execute(request: ReportRequest) -> int:
    """Print a summary of each run, and write the page. Raises RecipeError."""
    labelled = report_page.read(request.run)
    for each in labelled:
        _print(each)
    out = request.out or (labelled[0].run.folder / "report.html" if len(labelled) == 1 else Path("report.html"))
    written, has_charts = report_page.write(labelled, out)
    print(f"report: {out} ({size(written)})")
    if not has_charts:
        print("warning: the report has no charts, because plotly is not installed", file=sys.stderr)
    return 0


def _print(labelled: LabelledRun) -> None:
    run_dir, steps = labelled.run.folder, labelled.metrics.steps
    heading = f"{run_dir}: {plural(int(steps[-1]), 'step')}" if steps else f"{run_dir}: no step yet"
    if labelled.run.algorithm == EVALUATE:
        heading = f"{run_dir}: an evaluation"
    rows = [*(_changes(labelled.metrics) if steps else ()), *_scores(run_dir), *(_samples(run_dir) if steps else ())]
    if sys.stdout.isatty():
        console.print_rows(rows, heading=heading)
    else:
        print("\n".join([heading, *(f"  {label}{': ' if label else '  '}{text}" for label, text in rows)]))


def _changes(metrics: MetricColumns) -> Iterator[tuple[str, str]]:
    """Yield (metric, text with its first and last value) for each metric of PRINTED."""
    for key in PRINTED:
        if key not in metrics.columns:
            continue
        steps, values = metrics.columns[key]
        if len(values) > 1:
            yield key, f"{values[0]:.3f} at step {steps[0]:.0f}, {values[-1]:.3f} at step {steps[-1]:.0f}"


def _scores(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield (suite and checkpoint, text with the scores) for the last evaluation by each suite."""
    for suite, found in evaluation_folders.by_suite(evaluation_folders.of_run(run_dir)).items():
        yield f"{suite}, {found[-1].label}", score_tables.short(found[-1].scores)


def _samples(run_dir: Path, count: int = 3) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the first rollouts of the last validation; without one, of the last step."""
    found = sorted((run_dir / "rollouts").glob("val_*.jsonl")) or sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    if not found:
        return
    yield "samples", found[-1].name
    try:
        records = read_rollouts(found[-1], run_keys.source(run_dir))[:count]
    except RecipeError as error:
        yield "", str(error)
        return
    for record in records:
        yield "", f"{_clip(record['prompt'])!r} -> {_clip(record['completion'])!r}  reward {record['reward']:g}"


def _clip(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
