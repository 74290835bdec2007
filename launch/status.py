"""Show the state of runs with `python launch/status.py [FOLDER ...] [watch=true] [json=true]`.

Reads the run folder and queries the job, within seconds; says so if the job cannot be queried from here.
Exit status: 0; 1 if a run named on the command line failed or was stopped; 2 if there is no such run.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch import command_line, console, resources, run_files, run_summary
from launch.board import Board
from launch.command_line import Key
from launch.run_folder import RunFolder, find
from launch.run_state import state, states
from launch.terminal import on_one_line, plain
from launch.units import plural, seconds, size
from pipeline.config import Problem, RecipeError
from pipeline.config.formatting import on_one_line as shown

Row = tuple[str, str]
"""A label and a text."""
BAD = ("failed", "stopped")
BARS = "▁▂▃▄▅▆▇█"
WATCH_S = 2.0
"""Seconds between two updates of the board, by default."""
LABEL = 12
"""Width of the labels, in characters."""
HEADER = ("state", "step", "each", "left", "restarts", "written", "last value", "folder")


def _pause(text: str) -> float:
    """Return the seconds of `watch`. Raises ValueError with the expected format."""
    if text.lower() == "true":
        return WATCH_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("true, or a number of seconds above 0")
    return seconds


@dataclass(frozen=True)
class StatusRequest:
    """The command line."""

    run: Annotated[
        list[Path],
        Key(
            "FOLDER",
            "a run folder, shown in full. Any other folder, or several: one line for each run below; default: runs/",
            bare=True,
        ),
    ] = field(default_factory=list)
    watch: Annotated[
        float | None,
        Key(
            "true",
            "a live board, or a number of seconds between its updates; with one run, until it ends",
            read=_pause,
        ),
    ] = None
    json: Annotated[bool, Key("true", "print JSON")] = False


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, StatusRequest, execute, arguments)


def execute(request: StatusRequest) -> int:
    """Show the runs once, or watch them. Raises RecipeError."""
    return _watch(request, request.watch) if request.watch else _show(request)[0]


def _watch(request: StatusRequest, pause_s: float) -> int:
    if not sys.stdout.isatty() or request.json:
        while True:
            status, ended = _show(request)
            sys.stdout.flush()
            if ended:
                return status
            time.sleep(pause_s)
    with Board() as board:
        while True:
            status, ended = _show(request, board)
            board.draw("" if ended else f"{clock(time.time())}, every {pause_s:g} s; Ctrl-C ends", whole=ended)
            if ended:
                return status
            time.sleep(pause_s)


def _show(request: StatusRequest, board: Board | None = None) -> tuple[int, bool]:
    """Show the runs, and return (exit status, whether this was a single run that has ended). board: to show them on."""
    folders = request.run or [Path("runs").absolute()]
    if not request.run and not any(find(folders[0])):
        none_yet = f"no runs in {folders[0]} yet. Start one: python launch/submit.py recipe=tiny_sft"
        if board:
            board.print_rows([("", none_yet)])
        else:
            print(as_json([]) if request.json else none_yet)
        return 0, False
    only = folders[0]
    if len(folders) == 1 and (not only.is_dir() or (only / "recipe.yaml").exists()):
        return _show_one(RunFolder.at(only), request.json, board)
    summaries = _summaries(list(dict.fromkeys(run for folder in folders for run in _below(folder))))
    if request.json:
        print(as_json(summaries))
    elif board or sys.stdout.isatty():
        (board or console).print_table(HEADER, map(row, summaries))
    else:
        print("\n".join(map(on_one_line, table(summaries))))
    named = {str(folder) for folder in folders}
    return int(any(each["folder"] in named and each["state"] in BAD for each in summaries)), False


def _below(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder. Raises RecipeError if there are none."""
    found = list(find(folder))
    if not found:
        none_there = f"{folder} is not a run folder, and has none below it"
        raise RecipeError(
            Problem("run", "not-a-run", none_there)
            if folder.is_dir()
            else Problem("run", "file-not-found", f"{folder}: no such folder")
        )
    return found


def _summaries(folders: list[Path]) -> list[dict[str, Any]]:
    """Return a summary of each run, newest first; unreadable runs come last, with the reason."""
    runs, summaries, unreadable = [], [], []
    for folder in folders:
        try:
            runs.append(RunFolder.at(folder))
        except RecipeError as error:
            unreadable.append(_unreadable(folder, error))
    for run, of in zip(runs, states(runs), strict=True):
        try:
            summaries.append(run_summary.line(run, of))
        except (RecipeError, OSError) as error:
            unreadable.append(_unreadable(run.folder, error))
    return sorted(summaries, key=lambda each: -each["last_written"]) + unreadable


def _unreadable(folder: Path, error: Exception) -> dict[str, Any]:
    return {"folder": str(folder), "state": "unknown", "why": str(error)}


def _show_one(run: RunFolder, as_machine: bool, board: Board | None) -> tuple[int, bool]:
    of = state(run)
    try:
        summary = run_summary.whole(run, of)
    except OSError as error:
        raise RecipeError(Problem("run", "unreadable", f"{error.filename} cannot be read: {error.strerror}")) from None
    if as_machine:
        print(as_json(summary))
    elif board or sys.stdout.isatty():
        (board or console).print_rows(whole(summary), heading=_heading(summary))
        if board and (ranks := resources.ranks(run))[1]:
            board.print_table(*ranks)
    else:
        print(text(summary))
    return int(of.name in BAD), of.name in ("done", *BAD)


def text(summary: dict[str, Any]) -> str:
    """Return everything about a run as lines. summary: from `run_summary.whole`."""
    return "\n".join(map(plain, [_heading(summary), *(f"{label:{LABEL}s}{text}" for label, text in whole(summary))]))


def as_json(value: Any) -> str:
    """Return JSON, with null in place of NaN, which JSON does not have."""
    return json.dumps(plain_values(value), allow_nan=False)


def plain_values(value: Any) -> Any:
    """Return nested dicts and lists with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- a line per run -----------------------------------------------------------------------------------------------------


def table(summaries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the header and a line for each run, in columns. summaries: from `run_summary.line`."""
    rows = [HEADER, *map(row, summaries)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    for cells in rows:
        yield "  ".join(f"{cell:{width}s}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def row(run: dict[str, Any]) -> tuple[str, ...]:
    """Return a run's cells under HEADER. run: from `run_summary.line`."""
    folder = _shorter(run["folder"])
    if "step" not in run:
        return (run["state"], "", "", "", "", "", "", f"{folder}: {run['why']}")
    key = next(iter(run["metrics"]), None)
    return (
        run["state"],
        str(run["step"]) if run["max_steps"] is None else f"{run['step']}/{run['max_steps']}",
        seconds(run["seconds_per_step"]) if run["seconds_per_step"] else "",
        duration(run["seconds_left"]),
        str(run["restarts"] or ""),
        f"{since(run['last_written'])} ago",
        f"{key} {run['metrics'][key][-1]:.4g}" if key else "",
        folder,
    )


def _shorter(folder: str) -> str:
    here = f"{Path.cwd()}/"
    return folder.removeprefix(here)


# ---- one run ------------------------------------------------------------------------------------------------------------


def _heading(run: dict[str, Any]) -> str:
    return f"{run['name']} ({run['algorithm']}) in {run['folder']}"


def whole(run: dict[str, Any]) -> Iterator[Row]:
    """Yield (label, text) of everything about a run. run: a summary from `run_summary.whole`."""
    yield _row_of("state", run["state"], run["why"], "the ranks are starting" if run["starting"] and not run["answers"] else "")
    if run["job"]:
        yield _row_of("job", run["job"])
    if run["startup_text"]:
        yield _row_of("start-up", run["startup_text"])
    for part in run["components"]:
        yield f"  {part['name']}", "  ".join(filter(None, [part["state"], part["nodes"], part["reason"]]))
    yield _row_of("runs", f"{run['model']} on {run['backend']}", run["layout"])
    of = "" if run["max_steps"] is None else f" of {run['max_steps']}"
    yield _row_of("step", f"{run['step']}{of}", f"last written {since(run['last_written'])} ago")
    yield from _time(run)
    for key, values in run["metrics"].items():
        yield f"{key:16s}", f"{values[-1]:<10.4g} {sparkline(values)}  {_trend(values)}".rstrip()
    if run["phases"]:
        total = sum(run["phases"].values())
        parts = [f"{phase} {seconds(each)} ({each / total:.0%})" for phase, each in run["phases"].items()]
        rate = f"{run['tokens_per_s']:,.0f} tokens/s" if run["tokens_per_s"] else ""
        yield _row_of("phases", ", ".join(parts), rate)
    if run["idle"]:
        yield _row_of("idle", ", ".join(f"{realm} {share:.0%}" for realm, share in run["idle"].items()))
    for i, (component, text) in enumerate(run["resources"].items()):
        yield _row_of("resources" if i == 0 else "", f"{component}: {text}")
    for i, each in enumerate(run["warnings"]):
        yield _row_of("warnings" if i == 0 else "", f"step {each['step']}: {each['message']}")
    if run["answers"]:
        yield _row_of("answers", run["answers"].removeprefix("answers: "))
    if run["trains"]:
        yield _row_of("checkpoint", *_checkpoint(run["checkpoint"]))
    yield from _changes(run)
    for each in run["evaluations"]:
        yield _row_of("evaluation", *_evaluation(each, run))
    if len(run["attempts"]) > 1 or any(each["bad_nodes"] for each in run["attempts"]):
        yield from _starts(run["attempts"], run["state"] in ("running", "waiting", "unknown"))
    for i, each in enumerate(run["failure"]):
        yield _row_of("failure" if i == 0 else "", each)
    yield _row_of("logs", run["logs"])


def _row_of(label: str, *texts: str) -> Row:
    return label, "; ".join(filter(None, texts))


def _time(run: dict[str, Any]) -> Iterator[Row]:
    ends, saves = run["ends_by"], run["saves_by"]
    pace = f"{seconds(run['seconds_per_step'])} from step to step" if run["seconds_per_step"] else ""
    left = f"{duration(run['seconds_left'])} left" if run["seconds_left"] is not None else ""
    limit = f"time limit in {until(ends)}, at {clock(ends)}" if ends else ""
    by = f"must save by {clock(saves)}" if saves else ""
    if texts := [each for each in (pace, left, limit, by) if each]:
        yield _row_of("time", *texts)


def _changes(run: dict[str, Any]) -> Iterator[Row]:
    """Yield the changes of keys while the run went on, and those that it has not taken yet."""
    done = [
        (f"after step {each['step']}: {each['key']} {shown(each['old'])} -> {shown(each['new'])}", f"by {each['user']}")
        for each in run["changes"]
    ]
    asked = [(f"asked: {key} -> {shown(value)}",) for each in run["asked_changes"] for key, value in each["values"].items()]
    for i, texts in enumerate([*done, *asked]):
        yield _row_of("changes" if i == 0 else "", *texts)


def _checkpoint(run: dict[str, Any]) -> Iterator[str]:
    if "step" in run:
        yield f"step {run['step']}, {since(run['written'])} ago, {size(run['bytes'])}, complete"
        if run["count"] > 1:
            yield f"{plural(run['count'] - 1, 'earlier one')} kept"
    else:
        yield "none complete yet"
    if run["partial"]:
        yield f"being written, or interrupted: {', '.join(run['partial'])}"
    if run["incomplete"]:
        yield f"not complete: {', '.join(run['incomplete'])}"


def _evaluation(suite: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    scores = suite["scores"]
    latest = ""
    if scores:
        parts = (f"{task} {_score(found['value'])} ({_ends(found)})" for task, found in scores[max(scores)].items())
        latest = f": step {max(scores)}: {', '.join(parts)}"
    yield f"{suite['suite']}{latest}"
    for label, steps in (("evaluated", list(scores)), ("begun", suite["begun"]), ("pending", suite["pending"])):
        if steps:
            yield f"{label}: {', '.join(map(str, sorted(steps)))}"
    for step, why in suite["failed"].items():
        yield f"step {step} failed: {why}"
    if suite["asked"] and not suite["followed"] and (suite["pending"] or run["state"] in ("running", "waiting")):
        yield f"no process evaluates new checkpoints. Start it: python launch/evaluate.py run={run['folder']} step=follow"


def _ends(found: dict[str, Any]) -> str:
    return " to ".join(_score(found[end]) for end in ("low", "high"))


def _score(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _starts(attempts: list[dict[str, Any]], goes_on: bool) -> Iterator[Row]:
    for i, each in enumerate(attempts):
        latest = i == len(attempts) - 1
        verdict = each["verdict"] or ("under way" if latest and goes_on else "ended without a verdict")
        yield _row_of("starts" if i == 0 else "", f"{i + 1}: {clock(each['started'])}, {duration(each['lasted'])}", verdict)
        for node, why in each["bad_nodes"].items():
            yield _row_of("", f"   bad node {node}: {why}")
        if each["failure"] and not latest:  # the latest failure is shown in full
            yield _row_of("", f"   rank {each['failure']['rank']}: {run_files.last_line(each['failure'])}")


# ---- numbers for people -------------------------------------------------------------------------------------------------


def sparkline(values: list[float]) -> str:
    """Return a bar for each value, scaled from the minimum to the maximum; a space for NaN."""
    known = [value for value in values if value == value]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if value == value else " " for value in values)


def _trend(values: list[float]) -> str:
    """Return the mean of the later half of the values, and its difference from that of the earlier half."""
    known = [value for value in values if value == value]
    half = len(known) // 2
    if half < 2:
        return ""
    before, now = sum(known[:half]) / half, sum(known[-half:]) / half
    return f"mean {now:.4g}, {now - before:+.3g} over {half} steps"


def duration(value: float | None) -> str:
    """Return seconds as `D days, H:MM:SS`; "" for None."""
    return "" if value is None else str(timedelta(seconds=round(value)))


def since(moment: float) -> str:
    """Return the time since a moment in unix seconds."""
    return duration(max(0.0, time.time() - moment))


def until(moment: float) -> str:
    """Return the time until a moment in unix seconds; 0 if it has passed."""
    return duration(max(0.0, moment - time.time()))


def clock(moment: float) -> str:
    """Return a moment in unix seconds as local date and time."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
