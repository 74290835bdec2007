"""Build the page of a report: the sections of one or several runs, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.drawing import rank_traces, step_picture
from launch.drawing.html import Html, table, tag, text
from launch.pages import rollouts
from launch.pages.chart import Chart, figures, swatch
from launch.pages.curves import Curves, LabelledRun
from launch.pages.document import Section, add_plotly, details, document
from launch.pages.evaluation_section import evaluations
from launch.pages.overview import moment, overview
from launch.runs import resources
from launch.runs.run_folder import RunFolder
from launch.runs.run_state import RunState, states
from pipeline.config import environment_names
from pipeline.recipe.values import leaves


def read(folders: Sequence[Path]) -> list[LabelledRun]:
    """Return the runs in these folders, with labels and metrics. A repeated folder counts once. Raises RecipeError."""
    folders = list(dict.fromkeys(folders))
    runs = [RunFolder.at(folder) for folder in folders]
    return [LabelledRun(run, label, run.metrics()) for run, label in zip(runs, labels(folders), strict=True)]


def write(labelled: Sequence[LabelledRun], out: Path) -> tuple[int, bool]:
    """Write the page of runs to `out`, and plotly.min.js into the same folder.

    Return (bytes of the page, whether plotly.min.js is there). It can be missing only if Plotly is not installed.
    """
    text = page(labelled, states([labelled_run.run for labelled_run in labelled]), out)
    out.write_text(text, encoding="utf-8")
    return len(text.encode()), not out.is_file() or add_plotly(out.parent)


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, each with as many of its parent folders as make all names distinct."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


# ---- the page -----------------------------------------------------------------------------------------------------------


def page(labelled: Sequence[LabelledRun], of: Sequence[RunState], out: Path | None = None) -> str:
    """Return the text of the HTML page about runs and their states. of: the state of each run.

    out: the file to which the caller writes the page; None: no file. It decides whether encrypted samples may be shown.
    """
    names = [labelled_run.label for labelled_run in labelled]
    date_line = tag("p", f"Written {moment(time.time())} from the run folders, as they were at that moment.", class_="note")
    sections = [section for section in _sections(labelled, of, out) if section.content]
    return document(" · ".join(names) if len(names) <= 4 else f"{len(names)} runs", sections, names, date_line)


def _sections(labelled: Sequence[LabelledRun], of: Sequence[RunState], out: Path | None) -> Iterator[Section]:
    """Yield all sections of the page, including sections without content."""
    curves = Curves(labelled)
    sampled = rollouts.read([labelled_run.run.folder for labelled_run in labelled], out)
    names = [labelled_run.label for labelled_run in labelled]

    def grid(charts: Sequence[Chart]) -> list[Html]:
        return [figures(charts, names)] if charts else []

    yield Section("Overview", overview(labelled, of))
    phases = [chart for chart in curves.phase_times() if chart.series]
    refit = [*curves.take(r"(refit/|throughput/refit_)"), *curves.refit_times()]
    refit += curves.take("time/refit_")
    lengths = curves.take(r"(train|val)/(completion_tokens|truncated)")
    speed = curves.take("(throughput|time)/")
    used = resource_charts(curves)
    idle, ages = curves.idle(), [*curves.ages(), *curves.take("async/")]
    main = curves.take("(train|val)/")
    spread = [*rollouts.lengths(sampled, curves.marks), *rollouts.rewards(sampled, names, curves.marks)]
    yield Section("Curves", grid(main), "Lines: training; circles: validation; flags on the step axis: restarts, changes.")
    scored = evaluations([labelled_run.run for labelled_run in labelled], names, curves.marks)
    yield Section("Evaluations", scored, "Bands and brackets: 95% intervals. Verdicts: paired over the questions.")
    for group in curves.groups():
        yield Section(group.capitalize(), grid(curves.take(rf"{group}/" if group != "other" else "")))
    yield Section("Time", grid([*phases, *speed]), "rest: time/step without its phases.")
    pictures = step_pictures([labelled_run.run for labelled_run in labelled], names)
    yield Section("Timeline", [*pictures, *grid(idle)], "Of the last completed step; launch/timeline.py draws any step.")
    shares = "Means, and bands from min to max, over the ranks of a component. pipeline/monitor/steps.py has the formulas."
    yield Section("Resources", [*resource_warnings(labelled), *grid(used)], shares)
    yield Section(
        "Staleness", grid(ages), "Age: steps between the weights that generated a token and the step that trains on it."
    )
    compared = "the busiest rank's rate, as a fraction of cluster.network. Ranks that share GPUs use gloo, not NCCL"
    yield Section("Refit", grid(refit), f"efficiency: {compared}.")
    yield Section("Lengths and rewards", grid([*lengths, *spread]), "Bands: over the rollouts of a step.")
    if sampled.files or sampled.left_out:
        samples = [rollouts.samples(sampled)] if sampled.files else []
        reasons = [tag("p", labelled_run) for labelled_run in sampled.left_out]
        yield Section("Samples", [*reasons, *samples], f"{'; '.join(sampled.notes) or 'None can be read here'}.")
    yield Section(
        "Recipe" if len(labelled) == 1 else "Recipes", recipes([labelled_run.run for labelled_run in labelled], names)
    )


# ---- recipes --------------------------------------------------------------------------------------------------------------


MISSING = "-"


def recipes(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Html]:
    """Return elements with the recipe.yaml of each run and, for several runs, with a table of the keys that differ."""
    content = []
    if len(runs) > 1:
        rows = differences([environment_names.named(run.folder, run.recipe) for run in runs])
        header = ["key", *(text(swatch(i), label) for i, label in enumerate(labels))]
        cells = [[tag("code", key), *(tag("code", value) for value in values)] for key, values in rows]
        content.append(table(header, cells, "What differs") if rows else tag("p", "The recipes are the same."))
    for run, label in zip(runs, labels, strict=True):
        source = tag("pre", environment_names.recipe_text(run.folder))
        content.append(details(f"recipe.yaml of {label}" if len(runs) > 1 else "recipe.yaml", source, open_=len(runs) == 1))
    return content


def differences(recipes: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, its value in each recipe) for each key whose value is not the same in all, except run_dir."""
    flat = [{key: _text(value) for key, value in leaves(recipe)} for recipe in recipes]
    keys = dict.fromkeys(key for values_of_recipe in flat for key in values_of_recipe)
    rows = [(key, [values_of_recipe.get(key, MISSING) for values_of_recipe in flat]) for key in keys if key != "run_dir"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- resources ------------------------------------------------------------------------------------------------------------


def resource_charts(curves: Curves) -> list[Chart]:
    """Return the charts of resources, without the keys `*_max_rank`, which name a rank and are no curves."""
    curves.drop(f"{resources.RESOURCES}.*_max_rank$")
    return curves.take(resources.RESOURCES)


def resource_warnings(labelled: Sequence[LabelledRun]) -> list[Html]:
    """Return a table for each run whose last attempt has warnings about resources."""
    content = []
    for labelled_run in labelled:
        rows = [
            [line["step"], moment(line["time"]), line.get("rank"), line.get("message")]
            for line in resources.warnings(labelled_run.run)
        ]
        if rows:
            of = f" of {labelled_run.label}" if len(labelled) > 1 else ""
            content.append(table(["step", "time", "rank", "warning"], rows, f"Warnings{of}"))
    return content


# ---- timelines ------------------------------------------------------------------------------------------------------------


PIXELS = 1000
"""Assumed width of the picture of a step, in pixels. Spans that are shorter than a pixel are merged."""


def step_pictures(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Html]:
    """Return a picture of the last completed step of each run that has a timeline."""
    pictures = []
    for run, label in zip(runs, labels, strict=True):
        if recorded := rank_traces.attempt_traces(run.attempts):
            step = rank_traces.trace_with_step(recorded, None).step(None, PIXELS)
            pictures.append(_figure(step, f" of {label}" if len(runs) > 1 else ""))
    return pictures


def _figure(step: rank_traces.StepSpans, of: str) -> Html:
    title = f"{step.title}{of}, {step.end - step.begin:.3g} s"
    legend = [tag("span", tag("span", class_=f"swatch is-{key}", aria_hidden="true"), key) for key in step.categories()]
    picture = tag("div", step_picture.svg_figure(step, title), class_="scroll", tabindex="0")
    return tag("figure", tag("figcaption", tag("h3", title)), tag("div", *legend, class_="legend"), picture, class_="timeline")
