"""Show what every rank did when: python launch/timeline.py run=RUN_DIR [step=N] [steps=A-B] [gz=true] ...

Writes a trace for https://ui.perfetto.dev or chrome://tracing, and a PNG of one step. Ends with status 0; with 1 if the trace
was written but the picture could not be drawn (it needs matplotlib); with 2 if there is no such run or step, or no timeline.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TextIO

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import command_line, starting
from launch.command_line import Key
from launch.past_run import PastRun
from launch.timelines import reading, trace
from launch.timelines.reading import Rank
from launch.units import is_count, plural, size
from pipeline.config import Problem, RecipeError

EVER = (float("-inf"), float("inf"))
PIXELS = 1600
"""Of a picture's time axis, about."""


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not is_count(first) or (dash and not is_count(last)) or (dash and int(last) < int(first)):
        raise ValueError("steps such as 10-12")
    return int(first), int(last if dash else first)


@dataclass(frozen=True)
class Request:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "a run folder, which a job may be writing into", bare=True)]
    step: Annotated[int | None, Key("N", "the step that is drawn; default: the last one that ended")] = None
    steps: Annotated[
        tuple[int, int] | None,
        Key("A-B", "trace these steps alone: more ranks and steps may be too much for a browser", read=_steps),
    ] = None
    attempts: Annotated[Literal["all", "latest"], Key("all", "trace all starts of the ranks; default: the latest one")] = (
        "latest"
    )
    gz: Annotated[bool, Key("true", "write the trace compressed, which Perfetto reads as it is")] = False
    out: Annotated[
        Path | None, Key("FILE", "the trace; default: RUN_DIR/timeline.json or timeline.json.gz; the picture goes beside it")
    ] = None

    def problems(self) -> Iterator[Problem]:
        if self.steps and self.attempts == "all":
            yield Problem("steps", "contradiction", "got attempts=all too; expected one: the steps of one attempt are traced")

    @property
    def trace(self) -> Path:
        return self.out or self.run / ("timeline.json.gz" if self.gz else "timeline.json")

    def picture(self, step: str) -> Path:
        name = self.trace.name.removesuffix(".gz").removesuffix(".json")
        return self.trace.with_name(f"{name}_{step}.png")


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, Request, answer, arguments)


def answer(request: Request) -> int:
    """Raises RecipeError."""
    run = PastRun.at(request.run)
    attempts = _recorded(run)
    chosen = attempts if request.attempts == "all" else attempts[-1:]
    number = request.step if request.step is not None or request.steps is None else request.steps[1]
    drawn = reading.attempt_with(attempts, number)
    step = reading.step_of(drawn, number, PIXELS)
    window = EVER
    if request.steps:
        chosen = [reading.attempt_with(attempts, request.steps[0])]
        window = reading.window(chosen[0], *request.steps)
    events = write(request.trace, run, chosen, window)
    print(f"trace: {request.trace} ({size(request.trace.stat().st_size)}, {events:,} events of {_of(chosen)})")
    print(f"clocks: {reading.precision(drawn)}")
    for realm, rows in step.realms().items():
        print(f"idle: {realm} {reading.idle_share(rows):.1%} of {step.title}")
    return _draw(run, step, request.picture("start" if step.number is None else f"step_{step.number}"))


def _recorded(run: PastRun) -> list[list[Rank]]:
    """Of each attempt that has a timeline, oldest first. Raises RecipeError if none has."""
    found = [of for attempt in run.attempts if (of := reading.ranks(attempt))]
    if not found:
        switched = run.of("logger.timeline_enabled", True)
        why = "it has not begun, or is an older version's" if switched else "logger.timeline_enabled is false in its recipe"
        raise RecipeError(Problem("run", "no-records", f"{run.folder} has no timeline: {why}"))
    return found


def _of(attempts: list[list[Rank]]) -> str:
    return f"{plural(len(attempts[-1]), 'rank')}{f' in {len(attempts)} attempts' if len(attempts) > 1 else ''}"


def write(path: Path, run: PastRun, attempts: list[list[Rank]], window: tuple[float, float] = EVER) -> int:
    """The trace, of what was between two times; how many events it has."""
    with ExitStack() as stack:
        if path.suffix == ".gz":
            file: TextIO = stack.enter_context(gzip.open(path, "wt", encoding="utf-8"))
        else:
            file = stack.enter_context(open(path, "w", encoding="utf-8"))
        into = trace.Trace(file, attempts[0][0].began)
        into.begin()
        metrics = run.metrics()
        for of in attempts:
            trace.add(into, of, window)
            attempt = next(each for each in run.attempts if each.folder == of[0].path.parents[1])
            trace.add_startup(into, starting.of_attempt(attempt), window)
            within = {step: times for step, times in of[0].steps().items() if window[0] <= times[0] and times[1] <= window[1]}
            trace.add_steps(into, within, metrics)
        into.end(run=run.folder.name, clocks=reading.precision(attempts[-1]))
        return into.events


def _draw(run: PastRun, step: reading.Step, path: Path) -> int:
    try:
        from launch.timelines import picture
    except ImportError as error:
        print(f"error: no picture: {error.name} is not installed here (the job's environment has it)", file=sys.stderr)
        return 1
    picture.draw(step, f"{run.name}: {step.title}, {step.end - step.begin:.3g} s", path)
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
