"""Show the state of runs with `python launch/status.py [FOLDER ...] [watch=true] [json=true]`.

Reads the run folder and queries the job, within seconds; says so if the job cannot be queried from here.
Exit status: 0; 1 if a run named on the command line failed or was stopped; 2 if there is no such run.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.runs import resources, run_summary, status_text
from launch.runs.run_folder import RunFolder, find
from launch.runs.run_state import state, states
from launch.terminal import command_line, console
from launch.terminal.command_line import Key
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem, RecipeError

if TYPE_CHECKING:
    from launch.terminal.board import Board

BAD = ("failed", "stopped")
WATCH_S = 2.0
"""Seconds between two updates of the board, by default."""


def _pause(text: str) -> float:
    """Return the seconds between two updates that `watch` asks for. Raises ValueError with the expected format."""
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
            "a run folder: everything about the run; another folder, or several: one line per run; default: runs/",
            bare=True,
        ),
    ] = field(default_factory=list)
    watch: Annotated[
        float | None,
        Key(
            "true",
            "show a live board, of a single run until it ends; a number sets the seconds between updates",
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
    from launch.terminal.board import Board  # rich takes 50 ms, which a look without a board need not pay

    with Board() as board:
        while True:
            status, ended = _show(request, board)
            board.draw("" if ended else f"{status_text.clock(time.time())}, every {pause_s:g} s; Ctrl-C ends", whole=ended)
            if ended:
                return status
            time.sleep(pause_s)


def _show(request: StatusRequest, board: Board | None = None) -> tuple[int, bool]:
    """Show the runs, and return (exit status, whether this was a single run that has ended).

    board: the board that shows them; None: print them.
    """
    folders = request.run or [Path("runs").absolute()]
    if not request.run and not any(find(folders[0])):
        none_yet = f"no runs in {folders[0]} yet. Start one: python launch/submit.py recipe=tiny_sft"
        if board:
            board.print_rows([("", none_yet)])
        else:
            print(status_text.as_json([]) if request.json else none_yet)
        return 0, False
    only = folders[0]
    if len(folders) == 1 and (not only.is_dir() or (only / "recipe.yaml").exists()):
        return _show_one(RunFolder.at(only), request.json, board)
    summaries = _summaries(list(dict.fromkeys(run for folder in folders for run in _below(folder))))
    if request.json:
        print(status_text.as_json(summaries))
    elif board or sys.stdout.isatty():
        (board or console).print_table(status_text.HEADER, map(status_text.row, summaries))
    else:
        print("\n".join(map(on_one_line, status_text.table(summaries))))
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
        summary = run_summary.full(run, of)
    except OSError as error:
        raise RecipeError(Problem("run", "unreadable", f"{error.filename} cannot be read: {error.strerror}")) from None
    if as_machine:
        print(status_text.as_json(summary))
    elif board or sys.stdout.isatty():
        (board or console).print_rows(status_text.rows(summary), heading=status_text.heading(summary))
        if board and (ranks := resources.ranks(run))[1]:
            board.print_table(*ranks)
    else:
        print(status_text.text(summary))
    return int(of.name in BAD), of.name in ("done", *BAD)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
