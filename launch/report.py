"""Write a report of runs as an HTML page with `python launch/report.py run=RUN_DIR [run=RUN_DIR ...] [out=FILE]`.

The page shows curves, evaluations, phase times, a timeline, refits, lengths, samples and recipes. Curves of several runs share
a chart, and their evaluations are compared question by question. The page loads only plotly.min.js, which is written beside it.
The command also prints first and last values, scores and three samples of each run. It reads only files, so a run may be
active, or from an older version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch import command_line, console, run_keys
from launch.command_line import Key
from launch.evaluations import folder as evaluation_folders
from launch.evaluations import tables
from launch.pages import resources, rollouts
from launch.pages.chart import Chart, figures
from launch.pages.curves import Curves, LabelledRun
from launch.pages.document import Section, add_plotly, document
from launch.pages.evaluations import evaluations
from launch.pages.html import Html, tag
from launch.pages.overview import moment, overview
from launch.pages.recipe_section import recipes
from launch.pages.step_pictures import step_pictures
from launch.run_folder import MetricColumns, RunFolder
from launch.run_state import RunState, states
from launch.units import plural, size
from pipeline.config import RecipeError
from pipeline.metrics import read_rollouts

EVALUATE = "evaluate"
PRINTED = ("val/accuracy", "val/loss", "train/reward")


@dataclass(frozen=True)
class ReportRequest:
    """The command line."""

    run: Annotated[list[Path], Key("RUN_DIR", "a run folder; once for each run", bare=True)]
    out: Annotated[
        Path | None, Key("FILE", "the page; default: RUN_DIR/report.html of one run, report.html here of several")
    ] = None


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, ReportRequest, execute, arguments)


def execute(request: ReportRequest) -> int:
    """Print a summary of each run, and write the page. Raises RecipeError."""
    labelled = read(request.run)
    for each in labelled:
        _print(each)
    out = request.out or (labelled[0].run.folder / "report.html" if len(labelled) == 1 else Path("report.html"))
    written, has_charts = write(labelled, out)
    print(f"report: {out} ({size(written)})")
    if not has_charts:
        print("warning: the report has no charts, because plotly is not installed", file=sys.stderr)
    return 0


def read(folders: Sequence[Path]) -> list[LabelledRun]:
    """Return the runs in these folders, each once. Raises RecipeError."""
    folders = list(dict.fromkeys(folders))
    runs = [RunFolder.at(folder) for folder in folders]
    return [LabelledRun(run, label, run.metrics()) for run, label in zip(runs, labels(folders), strict=True)]


def write(labelled: Sequence[LabelledRun], out: Path) -> tuple[int, bool]:
    """Write the page of runs, with plotly.min.js beside it. Return (its bytes, False if plotly is not installed)."""
    text = page(labelled, states([each.run for each in labelled]), out)
    out.write_text(text, encoding="utf-8")
    return len(text.encode()), not out.is_file() or add_plotly(out.parent)


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parent folders as make them distinct."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        found = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(found)) == len(found):
            break
    return found


# ---- the page -----------------------------------------------------------------------------------------------------------


def page(labelled: Sequence[LabelledRun], of: Sequence[RunState], out: Path | None = None) -> str:
    """Return the HTML page of runs and their states. out: where it is written; None: nowhere."""
    names = [each.label for each in labelled]
    written = tag("p", f"Written {moment(time.time())} from what the run folders held then.", class_="note")
    sections = [section for section in _sections(labelled, of, out) if section.content]
    return document(" · ".join(names) if len(names) <= 4 else f"{len(names)} runs", sections, names, written)


def _sections(labelled: Sequence[LabelledRun], of: Sequence[RunState], out: Path | None) -> Iterator[Section]:
    """Yield all sections. A section without data is empty."""
    curves = Curves(labelled)
    sampled = rollouts.read([each.run.folder for each in labelled], out)
    names = [each.label for each in labelled]

    def grid(charts: Sequence[Chart]) -> list[Html]:
        return [figures(charts, names)] if charts else []

    yield Section("Overview", overview(labelled, of))
    phases = [chart for chart in curves.phase_times() if chart.series]
    refit = [*curves.take(r"(refit/|throughput/refit_)"), *curves.refit_times()]
    refit += curves.take("time/refit_")
    lengths = curves.take(r"(train|val)/(completion_tokens|truncated)")
    speed = curves.take("(throughput|time)/")
    used = resources.charts(curves)
    idle, ages = curves.idle(), [*curves.ages(), *curves.take("async/")]
    main = curves.take("(train|val)/")
    spread = [*rollouts.lengths(sampled, curves.marks), *rollouts.rewards(sampled, names, curves.marks)]
    yield Section("Curves", grid(main), "Lines: training; circles: validation; flags on the step axis: restarts, changes.")
    scored = evaluations([each.run for each in labelled], names, curves.marks)
    yield Section("Evaluations", scored, "Bands and brackets: 95% intervals. Verdicts: paired over the questions.")
    for group in curves.groups():
        yield Section(group.capitalize(), grid(curves.take(rf"{group}/" if group != "other" else "")))
    yield Section("Time", grid([*phases, *speed]), "rest: time/step without its phases.")
    drawn = step_pictures([each.run for each in labelled], names)
    yield Section("Timeline", [*drawn, *grid(idle)], "Of the last completed step; launch/timeline.py draws any step.")
    shares = "Means, and bands from min to max, over the ranks of a component. launch/OPERATIONS.md has the formulas."
    yield Section("Resources", [*resources.warnings(labelled), *grid(used)], shares)
    yield Section(
        "Staleness", grid(ages), "Age: steps between the weights that generated a token and the step that trains on it."
    )
    compared = "the busiest rank's rate, as a fraction of cluster.network; ranks that share GPUs use gloo instead"
    yield Section("Refit", grid(refit), f"efficiency: {compared}.")
    yield Section("Lengths and rewards", grid([*lengths, *spread]), "Bands: over the rollouts of a step.")
    if sampled.files or sampled.left_out:
        shown = [rollouts.samples(sampled)] if sampled.files else []
        why = [tag("p", each) for each in sampled.left_out]
        yield Section("Samples", [*why, *shown], f"{'; '.join(sampled.notes) or 'None can be read here'}.")
    yield Section("Recipe" if len(labelled) == 1 else "Recipes", recipes([each.run for each in labelled], names))


# ---- the terminal -------------------------------------------------------------------------------------------------------


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
    """Yield the first and the last value of each metric of PRINTED."""
    for key in PRINTED:
        if key not in metrics.columns:
            continue
        steps, values = metrics.columns[key]
        if len(values) > 1:
            yield key, f"{values[0]:.3f} at step {steps[0]:.0f}, {values[-1]:.3f} at step {steps[-1]:.0f}"


def _scores(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the scores of the last evaluation by each suite."""
    for suite, found in evaluation_folders.by_suite(evaluation_folders.of_run(run_dir)).items():
        yield f"{suite}, {found[-1].label}", tables.short(found[-1].scores)


def _samples(run_dir: Path, count: int = 3) -> Iterator[tuple[str, str]]:
    """Yield the first rollouts of the last validation, or else of the last step."""
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
