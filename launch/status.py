"""Show how runs are doing: python launch/status.py [FOLDER ...] [watch=SECONDS] [json=true]

Reads the run folder and asks the job, within seconds; if it cannot be asked from here, that is said. Ends with status 0; with 1
if a run that was named failed or was stopped; with 2 if there is no such run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import command_line, run_summary
from launch.command_line import Key
from launch.run_folder import RunFolder, find
from launch.run_state import state, states
from launch.terminal import on_one_line, plain
from launch.units import plural, seconds, size
from pipeline.config import Problem, RecipeError

BAD = ("failed", "stopped")
BARS = "▁▂▃▄▅▆▇█"
LABEL = 12


@dataclass(frozen=True)
class StatusRequest:
    """The command line."""

    run: Annotated[
        list[Path],
        Key(
            "FOLDER",
            "a run folder: all about it. Another folder, or several: a line for each run below; default: runs/",
            bare=True,
        ),
    ] = field(default_factory=lambda: [Path("runs").absolute()])
    watch: Annotated[float | None, Key("SECONDS", "again and again; of one run until it has ended")] = None
    json: Annotated[bool, Key("true", "the same as JSON, for machines")] = False


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, StatusRequest, execute, arguments)


def execute(request: StatusRequest) -> int:
    return _watch(request) if request.watch else _show(request)[0]


def _watch(request: StatusRequest) -> int:
    while True:
        if sys.stdout.isatty() and not request.json:
            print("\033[H\033[2J", end="")
        status, ended = _show(request)
        sys.stdout.flush()
        if ended:
            return status
        time.sleep(request.watch)


def _show(request: StatusRequest) -> tuple[int, bool]:
    """Return (the exit status, whether it was one run and that has ended). Raises RecipeError."""
    only = request.run[0]
    if len(request.run) == 1 and (not only.is_dir() or (only / "recipe.yaml").exists()):
        return _show_one(RunFolder.at(only), request.json)
    told = _lines(list(dict.fromkeys(run for folder in request.run for run in _below(folder))))
    print(as_json(told) if request.json else "\n".join(map(on_one_line, table(told))))
    named = {str(folder) for folder in request.run}
    return int(any(each["folder"] in named and each["state"] in BAD for each in told)), False


def _below(folder: Path) -> list[Path]:
    """Raises RecipeError if there is none."""
    found = list(find(folder))
    if not found:
        none_there = f"{folder} is no run folder, and there is none below it"
        raise RecipeError(
            Problem("run", "not-a-run", none_there)
            if folder.is_dir()
            else Problem("run", "file-not-found", f"{folder}: no such folder")
        )
    return found


def _lines(folders: list[Path]) -> list[dict[str, Any]]:
    """Return the runs, newest first; those that cannot be read come last, with the reason."""
    runs, told, unreadable = [], [], []
    for folder in folders:
        try:
            runs.append(RunFolder.at(folder))
        except RecipeError as error:
            unreadable.append(_unreadable(folder, error))
    for run, of in zip(runs, states(runs), strict=True):
        try:
            told.append(run_summary.line(run, of))
        except (RecipeError, OSError) as error:
            unreadable.append(_unreadable(run.folder, error))
    return sorted(told, key=lambda each: -each["last_written"]) + unreadable


def _unreadable(folder: Path, error: Exception) -> dict[str, Any]:
    return {"folder": str(folder), "state": "unknown", "why": str(error)}


def _show_one(run: RunFolder, json_asked: bool) -> tuple[int, bool]:
    of = state(run)
    try:
        told = run_summary.whole(run, of)
    except OSError as error:
        raise RecipeError(Problem("run", "unreadable", f"{error.filename} cannot be read: {error.strerror}")) from None
    print(as_json(told) if json_asked else "\n".join(map(plain, whole(told))))
    return int(of.name in BAD), of.name in ("done", *BAD)


def as_json(value: Any) -> str:
    """Return JSON, with null for NaN, which JSON does not have."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        return value if value == value else None

    return json.dumps(clean(value), allow_nan=False)


# ---- a line per run ---------------------------------------------------------------------------------------------------------


def table(told: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each run, in columns. told: as `run_summary.line` returns it."""
    rows = [("state", "step", "each", "left", "restarts", "written", "last value", "folder")]
    rows += [_row(each) for each in told]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:{width}s}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(told: dict[str, Any]) -> tuple[str, ...]:
    folder = _shorter(told["folder"])
    if "step" not in told:
        return (told["state"], "", "", "", "", "", "", f"{folder}: {told['why']}")
    key = next(iter(told["metrics"]), None)
    return (
        told["state"],
        str(told["step"]) if told["max_steps"] is None else f"{told['step']}/{told['max_steps']}",
        seconds(told["seconds_per_step"]) if told["seconds_per_step"] else "",
        duration(told["seconds_left"]),
        str(told["restarts"] or ""),
        f"{since(told['last_written'])} ago",
        f"{key} {told['metrics'][key][-1]:.4g}" if key else "",
        folder,
    )


def _shorter(folder: str) -> str:
    here = f"{Path.cwd()}/"
    return folder.removeprefix(here)


# ---- one run ----------------------------------------------------------------------------------------------------------------


def whole(told: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about a run. told: as `run_summary.whole` returns it."""
    yield f"{told['name']} ({told['algorithm']}) in {told['folder']}"
    yield _said("state", told["state"], told["why"], "the ranks are starting" if told["starting"] else "")
    if told["job"]:
        yield _said("job", told["job"])
    if told["startup_text"]:
        yield _said("start-up", told["startup_text"])
    for part in told["components"]:
        yield f"  {part['name']:{LABEL - 2}s}{'  '.join(filter(None, [part['state'], part['nodes'], part['reason']]))}"
    yield _said("runs", f"{told['model']} on {told['backend']}", told["layout"])
    of = "" if told["max_steps"] is None else f" of {told['max_steps']}"
    yield _said("step", f"{told['step']}{of}", f"last written {since(told['last_written'])} ago")
    yield from _time(told)
    for key, values in told["metrics"].items():
        yield f"{key:{max(LABEL, 16)}s}{values[-1]:<10.4g} {sparkline(values)}  {_trend(values)}".rstrip()
    if told["phases"]:
        total = sum(told["phases"].values())
        parts = [f"{phase} {seconds(each)} ({each / total:.0%})" for phase, each in told["phases"].items()]
        rate = f"{told['tokens_per_s']:,.0f} tokens/s" if told["tokens_per_s"] else ""
        yield _said("phases", ", ".join(parts), rate)
    if told["idle"]:
        yield _said("idle", ", ".join(f"{realm} {share:.0%}" for realm, share in told["idle"].items()))
    yield _said("checkpoint", *_checkpoint(told["checkpoint"]))
    if len(told["attempts"]) > 1 or any(each["bad_nodes"] for each in told["attempts"]):
        yield from _starts(told["attempts"])
    for i, each in enumerate(told["failure"]):
        yield _said("failure" if i == 0 else "", each)
    yield _said("logs", told["logs"])


def _said(label: str, *what: str) -> str:
    return f"{label:{LABEL}s}{'; '.join(filter(None, what))}"


def _time(told: dict[str, Any]) -> Iterator[str]:
    ends, saves = told["ends_by"], told["saves_by"]
    pace = f"{seconds(told['seconds_per_step'])} from step to step" if told["seconds_per_step"] else ""
    left = f"{duration(told['seconds_left'])} left" if told["seconds_left"] is not None else ""
    limit = f"its time is up in {until(ends)}, at {clock(ends)}" if ends else ""
    by = f"it must have saved by {clock(saves)}" if saves else ""
    if what := [each for each in (pace, left, limit, by) if each]:
        yield _said("time", *what)


def _checkpoint(told: dict[str, Any]) -> Iterator[str]:
    if "step" in told:
        yield f"step {told['step']}, {since(told['written'])} ago, {size(told['bytes'])}, complete"
        if told["count"] > 1:
            yield f"{plural(told['count'] - 1, 'earlier one')} kept"
    else:
        yield "none is complete yet"
    if told["partial"]:
        yield f"being written, or left so: {', '.join(told['partial'])}"
    if told["incomplete"]:
        yield f"not complete: {', '.join(told['incomplete'])}"


def _starts(attempts: list[dict[str, Any]]) -> Iterator[str]:
    for i, each in enumerate(attempts):
        latest = i == len(attempts) - 1
        verdict = each["verdict"] or ("under way" if latest else "ended without a verdict")
        yield _said("starts" if i == 0 else "", f"{i + 1}: {clock(each['started'])}, {duration(each['lasted'])}", verdict)
        for node, why in each["bad_nodes"].items():
            yield _said("", f"   bad node {node}: {why}")
        if each["failure"] and not latest:  # the latest one's is told at length
            yield _said("", f"   rank {each['failure']['rank']}: {each['failure']['message'].strip().splitlines()[-1]}")


# ---- as people read it ------------------------------------------------------------------------------------------------------


def sparkline(values: list[float]) -> str:
    """Return a bar for each value, scaled from the least to the greatest of them; a space for NaN."""
    known = [value for value in values if value == value]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if value == value else " " for value in values)


def _trend(values: list[float]) -> str:
    """Return the later half's mean against the earlier half's."""
    known = [value for value in values if value == value]
    half = len(known) // 2
    if half < 2:
        return ""
    before, now = sum(known[:half]) / half, sum(known[-half:]) / half
    return f"mean {now:.4g}, {now - before:+.3g} over {half} steps"


def duration(value: float | None) -> str:
    return "" if value is None else str(timedelta(seconds=round(value)))


def since(moment: float) -> str:
    return duration(max(0.0, time.time() - moment))


def until(moment: float) -> str:
    return duration(max(0.0, moment - time.time()))


def clock(moment: float) -> str:
    """Return a moment in this machine's local time."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
